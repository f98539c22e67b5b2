"""The reference twin of a wrapped model: the same training in one process on the whole global batch.

A :class:`Case` describes the training. :func:`train_beside_twin` runs it on this rank, trains an unwrapped copy on the
batches of all ranks, and compares gradients (including None) and weights after every step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insides import gradient_difference, tensor_difference, weight_difference
from paceline import World, unwrap
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.nn import SyncBatchNorm
from ranks import Pools as Pools

INPUTS, OUTPUTS = 5, 3


# -- models: forward takes the inputs and the names of the parts to use ------------------------------------------------


class Parts(nn.Module):
    """A trunk, two optional branches, and a parameter that is never used."""

    def __init__(self, dtype: torch.dtype = torch.float64, checkpointing: str = "none") -> None:
        super().__init__()
        self.trunk = nn.Linear(INPUTS, 6, dtype=dtype)
        self.a = nn.Sequential(nn.Linear(6, 6, dtype=dtype), nn.Tanh(), nn.Linear(6, OUTPUTS, dtype=dtype))
        self.b = nn.Linear(6, OUTPUTS, dtype=dtype)
        self.never = nn.Parameter(torch.ones(4, dtype=dtype))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, parts: frozenset[str]) -> Tensor:
        hidden = self._call(self.trunk, x.to(self.never.dtype)).tanh()
        out = self._call(self.a, hidden) if "a" in parts else hidden[:, :OUTPUTS]
        if "b" in parts:
            out = out + self._call(self.b, hidden)
        if "twice" in parts:
            out = out * self._call(self.b, hidden + 1).sigmoid()
        return out

    def _call(self, part: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return part(x)
        reentrant = self.checkpointing == "reentrant"
        # A reentrant checkpoint propagates gradients only if an input requires one.
        return checkpoint(part, x.requires_grad_() if x.is_leaf else x, use_reentrant=reentrant)


class Tied(nn.Module):
    """One matrix shared by input and output layers."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(INPUTS, INPUTS, bias=False, dtype=torch.float64)
        self.write = nn.Linear(INPUTS, INPUTS, dtype=torch.float64)
        self.write.weight = self.read.weight
        self.head = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor, parts: frozenset[str]) -> Tensor:
        return self.head(self.write(self.read(x).tanh()))


class Frozen(Parts):
    """Parts with a frozen trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.requires_grad_(False)


class Mixed(nn.Module):
    """Parameters of three precisions in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(INPUTS, 6)
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.narrow = nn.Linear(6, OUTPUTS, dtype=torch.bfloat16)
        self.single_again = nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor, parts: frozenset[str]) -> Tensor:
        hidden = self.wide(self.single(x.float()).tanh().double()).tanh().float()
        return (self.narrow(hidden.bfloat16()).float() + self.single_again(hidden)).double()


class Odd(nn.Module):
    """Complex, scalar, empty, transposed and one-element parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(INPUTS, OUTPUTS, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(OUTPUTS, 4, dtype=torch.float64).t())

    def forward(self, x: Tensor, parts: frozenset[str]) -> Tensor:
        phases = x.to(torch.complex128) @ self.complex
        out = (phases.real + phases.imag.sin()) * self.scalar + self.empty.sum()
        return out + (x[:, :4] @ self.transposed).tanh()


class ChannelsLast(nn.Module):
    """Convolutions with weights in channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 2, dtype=torch.float64), nn.Tanh(), nn.Conv2d(4, OUTPUTS, 2, dtype=torch.float64)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, parts: frozenset[str]) -> Tensor:
        image = (x[:, None, :, None] * x[:, None, None, :]).contiguous(memory_format=torch.channels_last)
        return self.net(image).mean((2, 3))


def reentrant() -> nn.Module:
    return Parts(checkpointing="reentrant")


def non_reentrant() -> nn.Module:
    return Parts(checkpointing="non-reentrant")


def single_precision() -> nn.Module:
    return Parts(torch.float32)


# -- which parts a rank uses in a micro-batch of a step ----------------------------------------------------------------

BOTH, A, B = frozenset("ab"), frozenset("a"), frozenset("b")
PATTERNS: dict[str, Callable[[int, int, int], frozenset[str]]] = {
    "all parts": lambda rank, micro, step: BOTH,
    "unused on rank 0": lambda rank, micro, step: A if rank == 0 else BOTH,
    "used on rank 0 alone": lambda rank, micro, step: BOTH if rank == 0 else A,
    "unused on all": lambda rank, micro, step: A,
    "unused on all in odd steps": lambda rank, micro, step: A if step % 2 else BOTH,
    "in some micro-batches only": lambda rank, micro, step: BOTH if micro % 2 else A,
    "other parts on other ranks": lambda rank, micro, step: (A, B)[(rank + step) % 2],
    "a part twice": lambda rank, micro, step: BOTH | {"twice"},
    "a part twice on rank 0": lambda rank, micro, step: BOTH | {"twice"} if rank == 0 else A,
    "no part at all on rank 0": lambda rank, micro, step: frozenset() if rank == 0 else B,
}


@dataclass(frozen=True)
class Case:
    """Model and settings of a training."""

    build: Callable[[], nn.Module] = Parts
    pattern: str = "all parts"
    batches: tuple[int, ...] = (12, 12, 7, 2, 9)
    """Samples in the global batch of each step."""
    micros: int = 1
    window: str = "both"
    """Place of no_sync: around "both" forward and backward, "backward", in "accumulate", or "sync_gradients" at end."""
    set_to_none: bool = True
    optimizer: str = "sgd"
    rtol: float = 1e-9
    options: dict[str, Any] = field(default_factory=dict)
    device: str | torch.device = "cpu"


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def global_batch(step: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(count, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, OUTPUTS, generator=generator, dtype=torch.float64)


def summed_loss(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y.to(out.dtype)) ** 2).sum()


def same_gradients(ours: nn.Module, twins: nn.Module, rtol: float = 1e-9, where: str = "") -> None:
    """Assert that every gradient equals the twin's, including None."""
    difference = gradient_difference(ours, twins, dist.get_world_size() if dist.is_initialized() else 1, rtol)
    assert not difference, f"{where} {difference}"


def same_weights(ours: nn.Module, twins: nn.Module, rtol: float = 1e-9, where: str = "") -> None:
    difference = weight_difference(ours, twins, rtol)
    assert not difference, f"{where} {difference}"


def same_tensor(mine: Tensor, other: Tensor, rtol: float, what: str) -> None:
    difference = tensor_difference(mine, other, rtol)
    assert not difference, f"{what} {difference}"


def train_beside_twin(
    world: World, case: Case, hook: Callable[..., Any] | None = None, state: Callable[[nn.Module], Any] | None = None
) -> list[list[str]]:
    """Train on this rank's slices and in one process; fail if they differ. Return the bucket layout.

    An optional communication `hook` gets the state ``state(model)``.
    """
    torch.manual_seed(0)
    module = case.build().to(case.device)
    twin = copy.deepcopy(unwrap(module))  # never compiled
    model = DistributedDataParallel(module, unused_parameters="allow", **case.options)
    if hook is not None:
        model.register_comm_hook(state(model) if state else None, hook)
    optimizers = make_optimizer(case.optimizer, model), make_optimizer(case.optimizer, twin)
    uses = PATTERNS[case.pattern]
    for step, count in enumerate(case.batches):
        x, y = (part.to(case.device) for part in global_batch(step, count))
        # Slice of each micro-batch and rank; empty for some ranks if there are fewer samples than ranks.
        pieces = [
            list(zip(xs.tensor_split(world.size), ys.tensor_split(world.size), strict=True))
            for xs, ys in zip(x.tensor_split(case.micros), y.tensor_split(case.micros), strict=True)
        ]
        mine = [(m, *piece[world.rank]) for m, piece in enumerate(pieces)]
        train_slices(model, case, mine, lambda micro, step=step: uses(world.rank, micro, step))

        together: dict[frozenset[str], list[tuple[Tensor, Tensor]]] = {}
        for micro, piece in enumerate(pieces):
            for rank, (xs, ys) in enumerate(piece):
                if len(xs):
                    together.setdefault(uses(rank, micro, step), []).append((xs, ys))
        losses = []
        for parts, slices in together.items():
            xs, ys = (torch.cat(column) for column in zip(*slices, strict=True))
            losses.append(summed_loss(twin(xs, parts), ys))
        (torch.stack(losses).sum() / count).backward()

        where = f"rank {world.rank} of {world.size}, step {step}:"
        same_gradients(module, twin, case.rtol, where)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.set_to_none)
        same_weights(module, twin, case.rtol, where)
    return model.bucket_layout()


def averaging_by(all_reduce: Callable[..., None]) -> Callable[..., Any]:
    """Return the communication hook of docs/collectives.md, which averages buckets with the given all-reduce."""

    def hook(group: Any, bucket: Any) -> Any:
        gradients = bucket.buffer()
        all_reduce(gradients, group=group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(gradients.div_(dist.get_world_size(group)))
        return future

    return hook


def train_slices(model: DistributedDataParallel, case: Case, mine: list[Any], uses: Callable[[int], Any]) -> None:
    """Run forward and backward on this rank's micro-batches; the last one synchronizes."""
    batches: Iterator[Any] = iter(mine)
    if case.window == "accumulate":
        batches = accumulate(model, mine, every=case.micros)
    for micro, x, y in batches:
        last = micro == case.micros - 1 and case.window != "sync_gradients"
        around_both, around_backward = no_sync_around(model, case.window, last)
        if len(x):
            with around_both, model.weight(len(x)):
                loss = summed_loss(model(x, uses(micro)), y)
                with around_backward:
                    loss.backward()
        elif last:
            model.sync_gradients()
    if case.window == "sync_gradients":
        model.sync_gradients()


def no_sync_around(
    model: DistributedDataParallel, window: str, last: bool
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    if last or window == "accumulate":
        return nullcontext(), nullcontext()
    return (nullcontext(), model.no_sync()) if window == "backward" else (model.no_sync(), nullcontext())


@contextmanager
def no_warning_about_cycles() -> Iterator[None]:
    """Silence torch's warning about ``backward(create_graph=True)``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        yield


# -- SyncBatchNorm -----------------------------------------------------------------------------------------------------

NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def whole_batch(sizes: tuple[int, ...], rest: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return inputs of shape `rest` for all ranks, ``sizes[r]`` samples for rank r."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sum(sizes), *rest, generator=generator, dtype=torch.float64).to(dtype)


def norm_beside_twin(
    world: World,
    sizes: tuple[int, ...],
    rest: tuple[int, ...],
    options: dict[str, Any],
    last: bool = False,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-10,
    device: str | torch.device = "cpu",
) -> list[str]:
    """Compare forward and backward on this rank's part with the whole batch in one process; return the buffers."""
    x = whole_batch(sizes, rest, dtype).to(device)
    if last:
        x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    torch.manual_seed(0)
    twin = NORMS[x.dim()](rest[0], **{"dtype": dtype if dtype is torch.float64 else torch.float32, **options})
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin.to(device)))
    for step in range(2):
        factors = torch.linspace(-1, 2, x.numel()).view(x.shape).to(device, dtype) * (step + 1)
        whole = x.clone().requires_grad_()
        theirs = twin(whole)
        (theirs * factors).sum().backward()
        mine = whole.detach().split(sizes)[world.rank].clone().requires_grad_()
        ours = layer(mine)
        (ours * factors.split(sizes)[world.rank]).sum().backward()

        where = f"rank {world.rank}, step {step}"
        assert ours.dtype is dtype
        if last and len(mine):
            assert ours.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
        same_tensor(ours.detach(), theirs.detach().split(sizes)[world.rank], rtol, f"{where} output")
        # Rounding is relative to the batch's gradient, not to this rank's part.
        expected = whole.grad.split(sizes)[world.rank]
        scale = float(whole.grad.abs().max()) if whole.numel() else 0.0
        torch.testing.assert_close(mine.grad, expected, rtol=rtol, atol=rtol * scale)
        for (name, parameter), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
            assert parameter.grad.dtype is parameter.dtype
            total = parameter.grad.double()
            dist.all_reduce(total)
            same_tensor(total, other.grad.double(), max(rtol, 1e-5 if parameter.dtype is torch.float32 else 0), name)
        for (name, buffer), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
            same_tensor(buffer, other, max(rtol, 1e-6 if buffer.dtype is torch.float32 else 0), f"{where} {name}")
        layer.zero_grad()
        twin.zero_grad()
    return [str(buffer.tolist()) for buffer in layer.buffers()]
