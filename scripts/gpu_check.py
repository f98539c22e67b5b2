"""Checks Paceline's DistributedDataParallel on the GPUs of this machine, beside torch's.

    python scripts/gpu_check.py                    # NCCL, with 1 rank, 2 ranks, … up to the number of GPUs
    python scripts/gpu_check.py --device cpu       # the same checks on CPU ranks: tries the script, not the GPUs

Run from the source tree; the package need not be installed. Weights are random and nothing is fetched. With one
rank the wrapper has nothing to average, so there its buckets are put to work all the same ("buckets" in the table).
Prints a table; the exit code is 0 if every check holds, 1 if one does not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import paceline  # noqa: E402
from paceline.errors import NonFiniteGradient  # noqa: E402
from paceline.fingerprint import weights_sha256  # noqa: E402

TIMEOUT_S = 900.0
BUCKET_BYTES = 25 * 2**20
TorchDDP = nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and the tokens of a rank's batch as (sequences, length)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    tokens: tuple[int, int]


SHAPES = {
    "SmolLM2-360M": Shape(960, 32, 15, 5, 2560, 49152, (4, 512)),
    "small": Shape(256, 4, 4, 2, 512, 4096, (4, 128)),
    "tiny": Shape(16, 2, 4, 2, 24, 64, (2, 8)),
}


@dataclass(frozen=True)
class Row:
    """One line of the table; `ok` is None for what is measured and not judged."""

    ranks: int
    what: str
    value: str
    ok: bool | None = None


@dataclass(frozen=True)
class Place:
    """Where a rank's checks run."""

    rank: int
    size: int
    device: torch.device
    timed: str
    """The shape of the model that is timed."""
    rounds: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compared(self) -> Shape:
        """The shape of the model that is compared with torch's."""
        return SHAPES["small" if self.on_gpu else "tiny"]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


# -- models ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention with rotary positions and grouped keys, then a gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al., "RoFormer", 2021)."""
    a, b = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    """A Llama of `shape` with tied embeddings; forward gives the mean loss of predicting each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.half = shape.hidden // shape.heads // 2

    def forward(self, ids: Tensor) -> Tensor:
        rates = 1e4 ** -(torch.arange(self.half, device=ids.device) / self.half)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        x = self.embedding(ids)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def build(place: Place, shape: Shape, dtype: torch.dtype) -> Llama:
    """The same random weights on every rank, and each time."""
    torch.manual_seed(0)
    with torch.device(place.device):
        return Llama(shape).to(dtype)


def batch(place: Place, shape: Shape, step: int) -> Tensor:
    """This rank's tokens in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    return torch.randint(shape.vocabulary, shape.tokens, generator=generator).to(place.device)


def with_torch(module: nn.Module, **options: Any) -> nn.Module:
    """torch's wrapper in its fastest setting."""
    return TorchDDP(module, gradient_as_bucket_view=True, **options)


def with_paceline(module: nn.Module, **options: Any) -> paceline.DistributedDataParallel:
    """Our wrapper, with buckets and collectives also where the rank is alone."""
    model = paceline.DistributedDataParallel(module, **options)
    model._whole_reducer()
    return model


# -- checks: each gives rows, the same number of them on every rank ----------------------------------------------------


def equality(place: Place) -> Iterator[Row]:
    """Losses and weights over several steps are those of torch's DDP."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        ends = []
        for wrap in (with_torch, paceline.DistributedDataParallel, with_paceline):
            module = build(place, place.compared, dtype)
            model = wrap(module)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for step in range(8):
                loss = model(batch(place, place.compared, step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            ends.append((torch.stack(losses), module))
            del model, optimizer
        for name, (losses_, module) in zip(("paceline", "buckets"), ends[1:], strict=True):
            loss_error = float((losses_ - ends[0][0]).abs().max() / ends[0][0].abs().max())
            pairs = zip(module.parameters(), ends[0][1].parameters(), strict=True)
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            what = f"{name} against torch DDP, {str(dtype).partition('.')[2]}: loss, weights differ by"
            yield Row(place.size, what, f"{loss_error:.1e}, {error:.1e}", max(loss_error, error) < tolerance)
            yield Row(place.size, f"{name}: bits alike on all ranks", "", alike(weights_sha256(module)))


def alike(value: str) -> bool:
    """Whether all ranks have the same value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


class Late(torch.autograd.Function):
    """Hands its gradient on late: the kernels that make it are launched, and have not run."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        pause(gradient.device)
        return gradient.clone()


def pause(device: torch.device) -> None:
    """Some milliseconds of the device's time, in the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    else:
        time.sleep(0.002)


class Slow(nn.Module):
    """Layers whose gradients come late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.late = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = Late.apply(x) if self.late else x
        return x.square().mean()


def streams(place: Place) -> Iterator[Row]:
    """Nothing reads a gradient or a bucket too early: delayed kernels give what a device that is waited for gives."""

    def train(late: bool, side: bool) -> Tensor:
        torch.manual_seed(0)
        module = Slow().to(place.device)
        module.late = late
        model = with_paceline(module, bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(place.rank)
        inputs = [torch.randn(32, 64, generator=generator).to(place.device) for _ in range(6)]
        place.synchronize()
        stream = torch.cuda.Stream(place.device) if side and place.on_gpu else None
        with torch.cuda.stream(stream):
            for x in inputs:
                model(x).backward()
                if not late:
                    place.synchronize()
                optimizer.step()
                optimizer.zero_grad()
                if not late:
                    place.synchronize()
            weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        place.synchronize()
        return weights

    expected = train(late=False, side=False)
    for side in (False, True):
        error = float((train(late=True, side=side) - expected).abs().max() / expected.abs().max())
        where = "a side stream" if side else "one stream"
        yield Row(place.size, f"late gradients in {where}: weights differ by", f"{error:.1e}", error < 1e-5)


def own_group(place: Place) -> Iterator[Row]:
    """The process group "paceline" hands tensors on the GPU to NCCL."""
    group = dist.new_group(backend="paceline")
    for device in {torch.device("cpu"), place.device}:
        tensor = torch.full((1000,), float(place.rank + 1), device=device)
        dist.all_reduce(tensor, group=group)
        right = bool((tensor == place.size * (place.size + 1) / 2).all())
        yield Row(place.size, f"all-reduce of the group paceline, {device.type}", "", right)
    if place.on_gpu:
        name = group._get_backend(place.device).name()
        yield Row(place.size, "its backend for the GPU", name, name == "nccl")
    torch.manual_seed(0)
    module = nn.Linear(8, 4).to(place.device)
    model, twin = with_paceline(module, process_group=group), with_torch(copy.deepcopy(module))
    x = torch.randn(6, 8, device=place.device) + place.rank
    for one in (model, twin):
        one(x).square().mean().backward()
    error = float((module.weight.grad - twin.module.weight.grad).abs().max())
    yield Row(place.size, "a model on the group paceline: gradients differ by", f"{error:.1e}", error < 1e-5)


def batch_norm(place: Place) -> Iterator[Row]:
    """SyncBatchNorm over uneven batches equals BatchNorm of one process."""
    parts = [torch.randn(3 + rank, 5, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(place.size)]
    torch.manual_seed(0)
    one = nn.BatchNorm1d(5).to(place.device)
    ours = paceline.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(one))
    whole = torch.cat(parts).to(place.device).requires_grad_()
    mine = parts[place.rank].to(place.device).requires_grad_()
    one(whole).sin().sum().backward()
    out = ours(mine)
    out.sin().sum().backward()
    start = sum(len(part) for part in parts[: place.rank])
    gradient = whole.grad[start : start + len(mine)]  # type: ignore[index]
    error = max(float((mine.grad - gradient).abs().max()), float((ours.running_var - one.running_var).abs().max()))
    yield Row(place.size, "SyncBatchNorm against one process: gradients, statistics", f"{error:.1e}", error < 1e-4)


def finite(place: Place) -> Iterator[Row]:
    """A NaN on one rank is an error on every rank."""
    model = with_paceline(nn.Linear(4, 4).to(place.device), check_finite=True)
    x = torch.ones(2, 4, device=place.device) * (float("nan") if place.rank == place.size - 1 else 1.0)
    try:
        model(x).sum().backward()
        raised = False
    except NonFiniteGradient as error:
        raised = f"rank {place.size - 1}" in str(error)
    yield Row(place.size, "check_finite names the rank whose gradient is NaN", "", raised)


def memory(place: Place) -> Iterator[Row]:
    """The peak of a step is at most torch DDP's and one bucket; what NCCL takes for itself is told beside it."""
    if not place.on_gpu:
        yield Row(place.size, "peak memory", "only on a GPU")
        return
    shape = SHAPES[place.timed]
    peaks, outside = [], []
    for wrap in (with_torch, with_paceline):
        torch.cuda.empty_cache()
        base, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        model = wrap(build(place, shape, torch.bfloat16))
        for step in range(4):
            if step == 3:  # after the buckets were made anew
                torch.cuda.reset_peak_memory_stats()
            model(batch(place, shape, step)).backward()
            model.zero_grad()
        place.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        outside.append(free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())
        del model
    shown = " / ".join(f"{peak / 2**20:.0f}" for peak in reversed(peaks))
    what = "peak memory of a step, paceline / torch, MiB"
    yield Row(place.size, what, shown, peaks[1] <= peaks[0] + BUCKET_BYTES)
    shown = " / ".join(f"{more / 2**20:.0f}" for more in reversed(outside))
    yield Row(place.size, "beside PyTorch's own memory, paceline / torch, MiB", shown)


def speed(place: Place) -> Iterator[Row]:
    """Medians over rounds in which the variants take turns."""
    shape = SHAPES[place.timed]
    dtype = torch.bfloat16
    models: dict[str, nn.Module] = {"bare": build(place, shape, dtype)}
    models["torch DDP"] = with_torch(build(place, shape, dtype))
    models["paceline"] = paceline.DistributedDataParallel(build(place, shape, dtype))
    if place.size == 1:
        models["buckets"] = with_paceline(build(place, shape, dtype))
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) for name, model in models.items()}
    ids = batch(place, shape, 0)
    steps: dict[str, list[float]] = {name: [] for name in models}
    hosts: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(place.rounds + 2):
        for name, model in models.items():
            place.synchronize()
            dist.barrier()
            start = time.perf_counter()
            model(ids).backward()
            launched = time.perf_counter()
            for last in (False, True):
                optimizers[name].step()
                optimizers[name].zero_grad()
                if not last:
                    model(ids).backward()
            place.synchronize()
            if round_ >= 2:  # the first two warm up, and make the buckets anew
                steps[name].append((time.perf_counter() - start) / 2)
                hosts[name].append(launched - start)
    for name in models:
        took, host = (1000 * statistics.median(seconds[name]) for seconds in (steps, hosts))
        ratio = statistics.median(a / b for a, b in zip(steps["torch DDP"], steps[name], strict=True))
        shown = f"{took:.2f} ms, torch DDP / this {ratio:.3f}; host {host:.2f} ms"
        yield Row(place.size, f"{place.timed} bf16, {shape.tokens[0]} × {shape.tokens[1]} tokens a rank: {name}", shown)


CHECKS: tuple[Callable[[Place], Iterator[Row]], ...] = (
    equality, streams, own_group, batch_norm, finite, memory, speed,
)  # fmt: skip


# -- ranks and report --------------------------------------------------------------------------------------------------


def serve(rank: int, size: int, store: str, options: argparse.Namespace, results: Any) -> None:
    """One rank: run every check, send its rows."""
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    place = Place(rank, size, device, options.model, options.rounds)
    rows: list[Row] = []
    for check in CHECKS:
        try:
            rows += check(place)
        except Exception as error:
            traceback.print_exc()
            results.put((rank, [*rows, Row(size, check.__name__, f"rank {rank}: {error}", False)]))
            return  # the other ranks cannot go on without this one
    dist.destroy_process_group()
    results.put((rank, rows))


def run(size: int, options: argparse.Namespace) -> list[Row]:
    """The rows of a world of `size` ranks: rank 0's, with what another rank found wrong."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder, "store")), options, results)
        ranks = [context.Process(target=serve, args=(rank, *arguments)) for rank in range(size)]
        for process in ranks:
            process.start()
        answers: dict[int, list[Row]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while len(answers) < size and time.monotonic() < deadline:
                try:
                    rank, rows = results.get(timeout=1)
                    answers[rank] = rows
                except queue.Empty:
                    if any(process.exitcode for process in ranks):
                        break
                if any(
                    rows and rows[-1].ok is False and rows[-1].value.startswith("rank ") for rows in answers.values()
                ):
                    break
        finally:
            for process in ranks:
                process.join(5 if len(answers) == size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return merged(size, answers)


def merged(size: int, answers: dict[int, list[Row]]) -> list[Row]:
    """One row for each check: a check holds if it does on every rank."""
    rows = list(answers.get(0, []))
    for rank, others in sorted(answers.items()):
        for at, other in enumerate(others):
            if at >= len(rows):
                rows.append(other)
            elif other.ok is False and rows[at].ok is not False:
                rows[at] = Row(size, other.what, f"rank {rank}: {other.value}", False)
    missing = [rank for rank in range(size) if rank not in answers]
    if missing:
        rows.append(Row(size, "all ranks come to their end", f"ranks {missing} did not", False))
    return rows


def exit_code(rows: list[Row]) -> int:
    """0 if every check holds."""
    return int(not rows or any(row.ok is False for row in rows))


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks; by default 1, 2, … one for each GPU")
    parser.add_argument("--model", choices=list(SHAPES), help="the model that is timed; SmolLM2-360M on GPUs")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of timing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not (torch.cuda.is_available() and dist.is_nccl_available()):
        print(
            "gpu_check: this PyTorch finds no CUDA GPU with NCCL; use --device cpu to try the script", file=sys.stderr
        )
        return 2
    gpus = torch.cuda.device_count() if on_gpu else 2
    options.model = options.model or ("SmolLM2-360M" if on_gpu else "tiny")
    sizes = options.ranks or list(range(1, gpus + 1))
    if (on_gpu and max(sizes) > gpus) or min(sizes) < 1 or options.rounds < 1:
        parser.error(f"--ranks {sizes} --rounds {options.rounds}: give at least 1 of each, and a GPU for each rank")
    rows = [row for size in sizes for row in run(size, options)]
    where = f"{torch.cuda.get_device_name(0)}, NCCL" if on_gpu else "CPU, a trial run"
    title = f"{where}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    if options.json:
        print(json.dumps({"title": title, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        table = Table("ranks", "check", "result", "", title=title)
        for row in rows:
            table.add_row(str(row.ranks), row.what, row.value, {True: "ok", False: "FAILS", None: ""}[row.ok])
        Console(width=140).print(table)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
