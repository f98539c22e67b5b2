"""A teaching example: asynchronous training with a parameter server, compared with synchronous training.

paceline run --nproc 3 examples/parameter_server.py             rank 0 keeps the weights, the others compute gradients
paceline run --nproc 3 examples/parameter_server.py --slow 4    the last rank takes four times as long for a gradient

In asynchronous training, a worker sends its gradient, receives the current weights and continues without waiting for
other workers. The staleness of a gradient is the number of updates by other workers since the worker received its
weights. In synchronous training, all ranks, including rank 0, average their gradients in every step. Both train for
the same time with the same optimizer. A Matplotlib figure shows the staleness and both losses. Tests on GPUs:
docs/gpu-status.md.
"""

import argparse
import importlib.util
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline


class Learner:
    """A network with its weights in one tensor, its data, its optimizer, and snapshots of the weights."""

    def __init__(self, rank: int, options: argparse.Namespace, delay: float = 1.0) -> None:
        torch.manual_seed(0)  # the same data and weights on every rank
        self.x = torch.randn(4096, 64)
        self.y = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))(self.x).argmax(1)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.weights = nn.Parameter(parameters_to_vector(self.net.parameters()).detach())
        vector_to_parameters(self.weights.data, self.net.parameters())  # parameters become views
        self.optimizer = torch.optim.SGD([self.weights], lr=options.lr, momentum=0.9)
        torch.manual_seed(rank)  # different batches on every rank
        self.seconds, self.delay, self.began = options.seconds, delay, time.perf_counter()
        self.updates, self.history = 0, [(0.0, self.weights.detach().clone())]

    def gradient(self) -> Tensor:
        """Return the gradient of the mean loss over a batch of 64."""
        began = time.perf_counter()
        batch = torch.randint(len(self.x), (64,))
        loss = F.cross_entropy(self.net(self.x[batch]), self.y[batch])
        gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        time.sleep((self.delay - 1) * (time.perf_counter() - began))
        return parameters_to_vector(gradients)

    def update(self, gradient: Tensor) -> None:
        """Take an optimizer step. About fifty times in total, save a snapshot of the weights."""
        self.weights.grad = gradient
        self.optimizer.step()
        self.updates += 1
        if self.elapsed() >= len(self.history) * self.seconds / 50:
            self.history.append((self.elapsed(), self.weights.detach().clone()))

    def elapsed(self) -> float:
        """Return the seconds since training began."""
        return time.perf_counter() - self.began

    @torch.no_grad()
    def losses(self) -> list[tuple[float, float]]:
        """Return the time and the loss over all data for each snapshot."""
        found = []
        for seconds, weights in self.history:
            self.weights.copy_(weights)
            found.append((seconds, F.cross_entropy(self.net(self.x), self.y).item()))
        return found


def serve(learner: Learner, workers: int) -> list[int]:
    """Update the weights with each gradient as it arrives. Return the staleness of the gradients."""
    message = torch.empty(1 + len(learner.weights))  # updates that the worker's weights include, then its gradient
    staleness: list[int] = []
    while workers:
        worker = dist.recv(message)  # from any worker
        is_over = learner.elapsed() >= learner.seconds
        if is_over:
            workers -= 1
        else:
            staleness.append(learner.updates - int(message[0]))
            learner.update(message[1:].clone())
        version = torch.tensor([-1.0 if is_over else learner.updates])
        dist.send(torch.cat([version, learner.weights.detach()]), worker)
    return staleness


def work(learner: Learner) -> list[int]:
    """Send gradients to rank 0, and receive weights, until rank 0 ends training. Return an empty list."""
    version = torch.zeros(1)
    answer = torch.empty(1 + len(learner.weights))
    while version >= 0:
        dist.send(torch.cat([version, learner.gradient()]), 0)
        dist.recv(answer, 0)
        version = answer[:1].clone()
        learner.weights.data.copy_(answer[1:])
    return []


def train_synchronously(learner: Learner, rank: int, size: int) -> None:
    """Average the gradients of all ranks in every step until rank 0 ends training."""
    while True:
        is_over = torch.tensor([float(rank == 0 and learner.elapsed() >= learner.seconds)])
        message = torch.cat([is_over, learner.gradient()])
        dist.all_reduce(message)
        if message[0] > 0:
            return
        learner.update(message[1:] / size)


def draw(staleness: list[int], curves: dict[str, list[tuple[float, float]]], out: str) -> None:
    """Draw staleness and losses, and save the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = torch.bincount(torch.tensor(staleness)).tolist()
    left.bar(range(len(counts)), [100 * count / len(staleness) for count in counts])
    left.set(
        xlabel="updates by others since the gradient's weights", ylabel="gradients (%)", yscale="log", title="staleness"
    )
    left.xaxis.get_major_locator().set_params(integer=True)
    for name, points in curves.items():
        right.plot(*zip(*points, strict=True), label=name)
    right.set(xlabel="seconds", ylabel="loss over all data", yscale="log", title="loss at the same time")
    right.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Train asynchronously and synchronously, and print and plot the results."""
    parser = argparse.ArgumentParser(description="Compare an asynchronous parameter server with synchronous training.")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each training run (default: 5)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD with momentum 0.9 (default: 0.1)")
    parser.add_argument("--slow", type=float, default=1.0, help="slowdown factor of the last rank (default: 1)")
    parser.add_argument("--out", default="parameter_server.png", help="figure file (default: parameter_server.png)")
    options = parser.parse_args()
    world = paceline.init()
    if world.size == 1:
        raise paceline.UsageError("a parameter server needs at least one worker; run paceline run --nproc 3")
    if options.seconds <= 0 or options.slow < 1:
        raise paceline.UsageError("--seconds must be above 0, and --slow at least 1")
    if importlib.util.find_spec("matplotlib") is None:
        raise paceline.UsageError("Matplotlib is not installed; run pip install matplotlib")
    delay = options.slow if world.rank == world.size - 1 else 1.0
    world.barrier()
    learner = Learner(world.rank, options, delay)
    staleness = serve(learner, world.size - 1) if world.is_main else work(learner)
    curves = {"asynchronous": learner.losses()}
    world.barrier()
    learner = Learner(world.rank, options, delay)
    train_synchronously(learner, world.rank, world.size)
    curves["synchronous"] = learner.losses()
    if staleness:
        mean, last = sum(staleness) / len(staleness), [points[-1][1] for points in curves.values()]
        print(f"asynchronous: {len(staleness)} updates, {mean:.1f} stale on average; loss {last[0]:.4f}")
        print(f"synchronous: {learner.updates} updates, none stale; loss {last[1]:.4f}; see {options.out}")
        draw(staleness, curves, options.out)
    world.close()


if __name__ == "__main__":
    main()
