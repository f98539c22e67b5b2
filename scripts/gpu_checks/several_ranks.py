"""Several ranks against one process on the whole global batch: they share a GPU over Gloo, or have one each."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from gpu_checks.models import MLP
from gpu_checks.rows import Place, Row, holds
from gpu_checks.wrapping import alike, between, difference, gradient_of, rows_of, torch_views, with_buckets
from paceline.errors import PacelineError

WIDTH = 16


def mlp(place: Place, dtype: torch.dtype = torch.float32) -> MLP:
    torch.manual_seed(0)
    return MLP(WIDTH, 64, 64, WIDTH).to(place.device, dtype)


def equality(place: Place) -> Iterator[Row]:
    """Weights after several steps are those of one process on the whole batch, and of torch's DDP."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        modules = [mlp(place, dtype) for _ in range(3)]
        models = [modules[0], torch_views(modules[1]), with_buckets(modules[2], bucket_cap_mb=0.01)]
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in modules]
        for step in range(8):
            whole, mine = rows_of(place, step, WIDTH)
            for number, model in enumerate(models):
                x = (whole if number == 0 else whole[mine]).to(dtype)
                model(x).backward()
                optimizers[number].step()
                model.zero_grad()
        name = str(dtype).partition(".")[2]
        for peer, module in (("one process", modules[0]), ("torch DDP", modules[1])):
            error = between(modules[2], module)
            yield holds(f"against {peer}, {name}: weights differ by", f"{error:.1e}", error < tolerance)
        yield holds(f"{name}: bits alike on all ranks", "", alike(modules[2]))


def weights(place: Place) -> Iterator[Row]:
    """Slices of different sizes give the mean over all rows, with sums and with means, also over micro-batches."""
    torch.manual_seed(0)
    reference = nn.Linear(WIDTH, 4).to(place.device)
    counts = [rank + 1 for rank in range(place.size)]
    whole = torch.randn(2, sum(counts), WIDTH, generator=torch.Generator().manual_seed(1)).to(place.device)
    classes = torch.arange(sum(counts), device=place.device) % 4
    start = sum(counts[: place.rank])
    mine = slice(start, start + counts[place.rank])
    F.cross_entropy(reference(whole.flatten(0, 1)), classes.repeat(2)).backward()
    expected = [gradient_of(parameter) for parameter in reference.parameters()]
    for reduction in ("sum", "mean"):
        module = copy.deepcopy(reference)
        module.zero_grad()
        model = with_buckets(module)
        for micro in paceline.accumulate(model, list(whole), every=2):
            with model.weight(counts[place.rank], reduction=reduction):
                F.cross_entropy(model(micro[mine]), classes[mine], reduction=reduction).backward()
        error = difference([gradient_of(parameter) for parameter in module.parameters()], expected)
        yield holds(f"uneven slices, {reduction}, 2 micro-batches: gradients differ by", f"{error:.1e}", error < 1e-5)


class Branches(nn.Module):
    """A trunk, a branch that a forward may leave out, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, branches: bool) -> Tensor:
        hidden = self.trunk(x).tanh()
        out: Tensor = self.branch(hidden) if branches else hidden
        return out.square().mean()


def unused(place: Place) -> Iterator[Row]:
    """A branch that rank 0 alone uses counts as zero elsewhere; a parameter that no rank uses keeps None."""
    torch.manual_seed(0)
    module = Branches().to(place.device)
    model = with_buckets(module, unused_parameters="allow", bucket_cap_mb=0.0005)
    reference = copy.deepcopy(module)
    for step in range(5):  # the later ones do not wait for parameters that have been absent
        model.zero_grad()
        reference.zero_grad()
        whole, mine = rows_of(place, step, WIDTH)
        model(whole[mine], branches=place.rank == 0).backward()
        for rank in range(place.size):
            (reference(whole[4 * rank : 4 * rank + 4], branches=rank == 0) / place.size).backward()
    names = [name for name, parameter in reference.named_parameters() if parameter.grad is not None]
    ours, theirs = dict(module.named_parameters()), dict(reference.named_parameters())
    error = difference([gradient_of(ours[name]) for name in names], [gradient_of(theirs[name]) for name in names])
    yield holds("a branch of rank 0 alone: gradients differ by", f"{error:.1e}", error < 1e-5)
    yield holds("a parameter that nobody uses keeps grad None", "", module.never.grad is None)


def sparse(place: Place) -> Iterator[Row]:
    """Sparse gradients of an embedding are averaged."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)).to(place.device)
    reference = copy.deepcopy(module)
    model = with_buckets(module)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(50, (place.size, 6), generator=generator).to(place.device)
        model.zero_grad()
        reference.zero_grad()
        model(ids[place.rank]).square().mean().backward()
        reference(ids).square().mean().backward()
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    gradients = [[gradient_of(p).to_dense() for p in pair] for pair in pairs]
    error = difference([pair[0] for pair in gradients], [pair[1] for pair in gradients])
    kept = gradient_of(module[0].weight).is_sparse  # type: ignore[arg-type]
    yield holds("a sparse embedding: gradients differ by", f"{error:.1e}", error < 1e-5 and kept)


class Twice(nn.Module):
    """One layer in two reentrant checkpoints, so that its gradient comes twice, the second time late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True).tanh()
        out: Tensor = hidden.square().mean()
        return out


def late(place: Place) -> Iterator[Row]:
    """A gradient that comes after its bucket was launched is averaged, too."""
    torch.manual_seed(0)
    module = Twice().to(place.device)
    reference = copy.deepcopy(module)
    model = with_buckets(module, bucket_cap_mb=0.0002)
    worst = 0.0
    for step in range(4):
        whole, mine = rows_of(place, step, WIDTH)
        model.zero_grad()
        reference.zero_grad()
        model(whole[mine]).backward()
        reference(whole).backward()
        pairs = list(zip(module.parameters(), reference.parameters(), strict=True))
        error = difference([gradient_of(a) for a, _ in pairs], [gradient_of(b) for _, b in pairs])
        worst = max(worst, error)
    yield holds("a layer in two reentrant checkpoints: gradients differ by", f"{worst:.1e}", worst < 1e-5)


def batch_norm(place: Place) -> Iterator[Row]:
    """SyncBatchNorm over uneven batches equals BatchNorm of one process, for all layouts, types and weights."""
    cases = {
        "values": ((), {}, torch.float32, 1e-4),
        "images": ((6, 7), {}, torch.float32, 1e-4),
        "images in channels last": ((6, 7), {}, torch.float32, 1e-4),
        "bfloat16 images in channels last": ((6, 7), {}, torch.bfloat16, 3e-2),
        "bfloat16 volumes": ((2, 3, 4), {}, torch.bfloat16, 3e-2),
        "no weights": ((4,), {"affine": False}, torch.float32, 1e-4),
        "no running statistics": ((4,), {"track_running_stats": False}, torch.float32, 1e-4),
    }
    kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    for name, (sides, arguments, dtype, tolerance) in cases.items():
        torch.manual_seed(0)
        one = kinds[len(sides)](5, **arguments).to(place.device)
        error = _norms_differ(place, one, sides, dtype, "channels last" in name)
        what = f"SyncBatchNorm against one process, {name}: outputs, gradients, statistics differ by"
        yield holds(what, f"{error:.1e}", error < tolerance)


def _norms_differ(place: Place, one: nn.Module, sides: tuple[int, ...], dtype: torch.dtype, last: bool) -> float:
    """How far outputs, gradients and statistics are apart after a step; gradients of weights are summed over ranks."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(place.size)]
    parts = [torch.randn(3 + rank, 5, *sides, generator=one) for rank, one in enumerate(generators)]
    ours = paceline.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one))
    layout = torch.channels_last if last else torch.contiguous_format
    whole, mine = (
        x.to(place.device, dtype).contiguous(memory_format=layout).requires_grad_()
        for x in (torch.cat(parts), parts[place.rank])
    )
    first = sum(len(part) for part in parts[: place.rank])
    slope = torch.randn(whole.shape, generator=torch.Generator().manual_seed(9)).to(place.device, dtype)
    expected, got = one(whole), ours(mine)
    expected.backward(slope)
    got.backward(slope[first : first + len(mine)])
    pairs = [(expected[first : first + len(mine)], got), (gradient_of(whole)[first : first + len(mine)], mine.grad)]
    for theirs, here in zip(one.parameters(), ours.parameters(), strict=True):
        dist.all_reduce(gradient_of(here))
        pairs.append((gradient_of(theirs), gradient_of(here)))
    pairs += zip(one.buffers(), ours.buffers(), strict=True)
    return max(difference([b.float()], [a.float()]) for a, b in pairs if b is not None)


def sharded(place: Place) -> Iterator[Row]:
    """The sharded optimizer gives the weights of the unsharded one, and its state is a share of it."""
    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "foreach": (torch.float32, {"foreach": True}),
        "fused": (torch.float32, {"fused": True}),
        "fused, bfloat16": (torch.bfloat16, {"fused": True}),
        "bfloat16, float32 master weights": (torch.bfloat16, {"master_dtype": torch.float32}),
    }
    for name, (dtype, settings) in kinds.items():
        modules = [mlp(place, dtype) for _ in range(2)]
        models = [with_buckets(module, bucket_cap_mb=0.01) for module in modules]
        plain = {key: value for key, value in settings.items() if key in ("foreach", "fused")}
        ours = paceline.optim.ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01, **settings)
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(models[0].parameters(), lr=0.01, **plain), ours]
        for step in range(10):
            whole, mine = rows_of(place, step, WIDTH)
            for model, optimizer in zip(models, optimizers, strict=True):
                model(whole[mine].to(dtype)).backward()
                paceline.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        error = between(modules[1], modules[0])
        # Rounding to bfloat16 in every step, or not, makes the difference that master weights are for.
        tolerance = 1e-6 if dtype is torch.float32 else 0.1 if "master_dtype" in settings else 1e-2
        yield holds(f"sharded AdamW, {name}: weights differ by", f"{error:.1e}", error < tolerance)
        yield holds(f"sharded AdamW, {name}: bits alike on all ranks", "", alike(modules[1]))
        held, all_of_it = (
            sum(t.numel() for state in one for t in state.values() if isinstance(t, Tensor) and t.dim() > 0)
            for one in (ours._inner.state.values(), optimizers[0].state.values())
        )
        most = 1.2 * all_of_it / place.size * (1.5 if "master_dtype" in settings else 1)
        yield holds(f"sharded AdamW, {name}: its share of the state", f"{held / all_of_it:.2f}", held <= most)
        del ours, optimizers, models


def abort(place: Place) -> Iterator[Row]:
    """After an exception in the middle of backward on all ranks, or on one, the next step is right."""
    for who, ranks in (("all ranks", range(place.size)), ("the last rank", range(place.size - 1, place.size))):
        module = mlp(place)
        reference = copy.deepcopy(module)
        model = with_buckets(module, bucket_cap_mb=0.01)
        whole, mine = rows_of(place, 0, WIDTH)
        model(whole[mine]).backward()  # buckets are in their order now
        model.zero_grad()
        raised = aborted(model, whole[mine], place.rank in ranks)
        model.zero_grad()
        whole, mine = rows_of(place, 1, WIDTH)
        model(whole[mine]).backward()
        reference(whole).backward()
        pairs = list(zip(module.parameters(), reference.parameters(), strict=True))
        error = difference([gradient_of(a) for a, _ in pairs], [gradient_of(b) for _, b in pairs])
        what = f"a backward that {who} aborted, then a whole one: gradients differ by"
        yield holds(what, f"{error:.1e}", error < 1e-5)
        yield holds(f"every rank is told that {who} aborted it", "", raised)


def aborted(model: nn.Module, x: Tensor, here: bool) -> bool:
    """Run a backward that an exception ends `here`, or elsewhere; returns whether this rank was told."""

    def fail(*_: object) -> None:
        raise ArithmeticError("on purpose")

    module: MLP = model.module  # type: ignore[assignment]
    handle = module.layers[1].register_full_backward_hook(fail) if here else None
    try:
        model(x).backward()
        list(model.parameters())  # beside a GPU other ranks' news may be read as late as here
    except (ArithmeticError, PacelineError):
        return True
    finally:
        if handle is not None:
            handle.remove()
    return False
