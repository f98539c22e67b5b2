"""A plain training script that a chaos test strikes: everything random, everything that has state.

    paceline run --nproc 2 loop.py FOLDER '{"wrapper": "torch", "backend": "gloo", "steps": 10}'

Every rank writes FOLDER/rank-<n>.json at its end: SHA-256 of everything that makes up the run, and its counts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline.core.telemetry.failpoints import strike
from paceline.data import DataLoader
from paceline.optim import ShardedOptimizer


class Optimizer(torch.optim.AdamW):
    """AdamW that can be struck when the first group of parameters is updated and the second is not."""

    def _init_group(self, group: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if len(self.param_groups) > 1 and group is self.param_groups[1]:
            strike("optimizer")
        return super()._init_group(group, *arguments, **options)  # type: ignore[no-untyped-call]


def network() -> nn.Sequential:
    """Return a network with buffers and dropout."""
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )


def wrap(net: nn.Module, settings: dict[str, Any]) -> nn.Module:
    """Return `net` in the wrapper that the settings name, with several buckets."""
    if settings["wrapper"] == "ours":
        return paceline.DistributedDataParallel(net, bucket_cap_mb=settings["bucket_mb"])
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=settings["bucket_mb"])
    model.register_forward_pre_hook(lambda *_: strike("forward"))
    middle = list(net.parameters())[-3]  # its gradient is there when the last ones' bucket is on its way
    middle.register_post_accumulate_grad_hook(lambda _: strike("bucket"))
    return model


def digest(value: Any) -> str:
    """Return the SHA-256 of nested tensors and plain values."""
    content = hashlib.sha256()

    def add(each: Any) -> None:
        if isinstance(each, Tensor):
            content.update(str((each.dtype, tuple(each.shape))).encode())
            content.update(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(each, dict):
            for key in sorted(each, key=str):
                content.update(repr(key).encode())
                add(each[key])
        elif isinstance(each, list | tuple):
            for item in each:
                add(item)
        else:
            content.update(repr(each).encode())

    add(value)
    return content.hexdigest()


def main() -> None:
    """Train, and write the digests."""
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    settings = {"wrapper": "ours", "backend": "paceline", "steps": 10, "every": None, "bucket_mb": 0.005, **given}
    world = paceline.init(settings["backend"])
    with paceline.set_seed(0):
        data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)), torch.arange(256))
        net = network()
    model = wrap(net, settings)
    parameters: list[Tensor] = list(net.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}]
    optimizer: torch.optim.Optimizer = Optimizer(groups, lr=0.01)
    if settings.get("sharded"):
        optimizer = ShardedOptimizer(groups, Optimizer, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    in_background = settings.get("background", False)
    checkpointer = paceline.Checkpointer(folder / "checkpoints", every=settings["every"], async_save=in_background)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    for name, state in states.items():
        checkpointer.register(name, state)
    if checkpointer.steps():
        checkpointer.restore()
    done = checkpointer.step()
    while done < settings["steps"]:
        for inputs, labels, samples in loader:
            with open(folder / f"used-{world.rank}", "a") as log:
                log.write(f"{done + 1} 0 {time.time()} {samples.tolist()}\n")
            mean = cross_entropy(model(inputs + torch.rand_like(inputs) * 0.1), labels)
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done = checkpointer.step()
            if done >= settings["steps"]:
                break
    if done not in checkpointer.steps():
        checkpointer.save(done)
    report(folder, world.rank, checkpointer, [net.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    checkpointer.close()
    world.close()


def report(folder: Path, rank: int, checkpointer: paceline.Checkpointer, states: list[Any]) -> None:
    """Write this rank's digests and counts."""
    used: dict[tuple[int, int], str] = {}
    for line in (folder / f"used-{rank}").read_text().splitlines():
        step, turn, _, samples = line.split(" ", 3)
        used[int(step), int(turn)] = samples
    history = checkpointer.history
    outcome = {
        "states": digest(states),
        "generators": digest(torch.get_rng_state()),
        "samples": digest(used),
        "steps": max(used)[0],
        "restarts": history.restarts,
        "redone": history.steps_redone,
        "from": history.rescued_from,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
