"""A training script with one known fault, or with the fault fixed, for ``profiler_advice.py``.

python -m paceline profile --nproc 2 benchmarks/faulty_training.py lengths 150            # the fault
python -m paceline profile --nproc 2 benchmarks/faulty_training.py lengths 150 --remedied
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import paceline
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader

FAULTS = (
    "lengths",
    "hand-save",
    "slow-loader",
    "busy-loader",
    "tiny-batch",
    "checkpoints",
    "slow-rank",
    "slow-rank-torch",
    "slow-half",
    "evaluation",
    "garbage",
    "threads",
    "nothing",
)


class Pairs(Dataset[Any]):
    """Pairs of an input and its target. With the fault ``lengths``, inputs are sequences of unequal length."""

    def __init__(self, fault: str, size: int, width: int, *, remedied: bool) -> None:
        self.width = width
        self.works = (0.00025 if remedied else 0.0005) if fault == "busy-loader" else 0.0
        generator = torch.Generator().manual_seed(0)
        tokens = torch.empty(size).log_normal_(4.1, 0.8, generator=generator).clamp(8, 512)  # a few are huge
        self.lengths = tokens.int().tolist() if fault == "lengths" else []
        self.wait = 0.001 if fault == "slow-loader" else 0.0
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wait:
            time.sleep(self.wait)  # simulates a slow disk or network
        if self.works:  # simulates a transform
            end = time.thread_time() + self.works
            while time.thread_time() < end:
                pass
        if self.lengths:
            return torch.full((self.lengths[index],), index % 97), torch.zeros(1)
        return torch.full((self.width,), float(index % 97) / 97), torch.zeros(1)


class Sequences(nn.Module):
    """A small model for token sequences. Its cost is proportional to the number of tokens, including padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(97, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a number for each sequence."""
        out: Tensor = self.layers(self.table(tokens)).mean(1)
        return out


def parse(x: Tensor) -> list[dict[str, Any]]:
    """Return records that refer to each other, so that only the garbage collector frees them."""
    records: list[dict[str, Any]] = [{"value": value, "tags": [value]} for value in x[:, :16].flatten().tolist()]
    for record, following in zip(records, records[1:] + records[:1], strict=True):
        record["next"] = following
    return records


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate sequences of unequal length."""
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("steps", type=int)
    parser.add_argument("--remedied", action="store_true")
    parser.add_argument("--workers", type=int, default=2, help="workers of the remedied slow-loader")
    arguments = parser.parse_args()
    fault, remedied = arguments.fault, arguments.remedied
    world = paceline.init()
    torch.manual_seed(0)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(4 * cores if fault == "threads" and not remedied else max(1, cores // world.size))
    width, depth = {"tiny-batch": (256, 8), "lengths": (64, 1), "threads": (256, 4)}.get(fault, (512, 4))
    batch = 4 if fault == "tiny-batch" else 64 if fault in ("lengths", "slow-loader", "busy-loader") else 512
    if fault == "tiny-batch" and remedied:
        batch *= 2
    data = Pairs(fault, batch * arguments.steps, width, remedied=remedied)
    options: dict[str, Any] = {"collate_fn": padded} if fault == "lengths" else {}
    if fault == "lengths" and remedied:
        options |= {"cost": lambda sample: len(sample[0]), "padded": True}
    if fault == "slow-loader" and remedied:
        options |= {"num_workers": arguments.workers}
    loader = DataLoader(data, batch_size=batch, shuffle=True, **options)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    wrap: Any = nn.parallel.DistributedDataParallel if fault.endswith("torch") else paceline.DistributedDataParallel
    model = wrap(Sequences() if fault == "lengths" else nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    folder = Path(tempfile.gettempdir()) / f"faulty-training-{world.rank if fault == 'hand-save' else 'all'}"
    every = 50 if remedied else 5
    checkpointer = Checkpointer(folder / "checkpoints", every=every if fault == "checkpoints" else None)
    checkpointer.register("model", model)
    checkpointer.register("optimizer", optimizer)

    def save_by_hand(step: int) -> None:
        folder.mkdir(exist_ok=True)
        torch.save({"step": step, "optimizer": optimizer.state_dict(), "model": model.state_dict()}, folder / "m.pt")

    def evaluate() -> None:
        end = time.thread_time() + 0.3
        with torch.no_grad():
            while time.thread_time() < end:
                model.module(x)

    if fault == "garbage" and remedied:
        gc.freeze()
        gc.disable()
    for step, (x, _) in enumerate(loader, start=1):
        if fault == "garbage":
            parse(x)
            if remedied and step % 100 == 0:
                gc.collect()
        out = model(x)
        is_late = fault.startswith("slow-rank") or (fault == "slow-half" and step > arguments.steps // 2)
        if is_late and not remedied and world.rank == 1:
            time.sleep(0.02)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "hand-save" and world.rank == 0 and step % every == 0:
            save_by_hand(step)
        if fault == "evaluation" and world.rank == 0 and step % 30 == 0 and not remedied:
            evaluate()
        if fault == "checkpoints":
            checkpointer.step()


if __name__ == "__main__":
    main()
