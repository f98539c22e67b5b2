"""Promise: a corrupted checkpoint loads correctly or not at all, executes no code, and needs little memory.

A mutation changes one file. Half of the mutations also forge the checksums, as an attacker would.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drawn import LONG
from insides import checkpoint_files, strict_json, tensor_digest
from paceline.checkpoint import Checkpointer
from paceline.data import DataLoader
from paceline.errors import PacelineError

COUNT = 5000 if LONG else 200
MEMORY = 2**30
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "exec", "compile")
armed: list[Path] = []  # the allowed folder while a checkpoint is read
violations: list[str] = []


class Trap:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def watch(event: str, arguments: Any) -> None:
    if not armed:
        return
    if event in FORBIDDEN:
        violations.append(f"{event} {arguments!r}"[:200])
    elif event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and not arguments[0].startswith(str(armed[0])):
            violations.append(f"{event} {arguments!r}"[:200])


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Record forbidden events, and limit memory to :data:`MEMORY` more than now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    armed.append(folder)
    try:
        yield
    finally:
        armed.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)


class Job:
    """A model, an optimizer and a loader that write and restore checkpoints of steps 1 and 2."""

    def __init__(self, folder: Path) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = DataLoader(TensorDataset(torch.arange(24.0).view(12, 2)), batch_size=4, shuffle=True)
        self.checkpointer = Checkpointer(folder)
        for name in ("model", "optimizer", "loader"):
            self.checkpointer.register(name, getattr(self, name))

    def train(self) -> None:
        for step, (x,) in enumerate(self.loader, 1):
            self.model(x).sum().backward()
            self.optimizer.step()
            self.checkpointer.save(step, metadata={"loss": 0.5, "curve": [1.0, 2.0]})
            if step == 2:
                break

    def state(self) -> str:
        total = hashlib.sha256()
        for value in [*self.model.state_dict().values(), *self.optimizer.state_dict()["state"].values()]:
            # A forged state may replace a tensor by a number; the optimizer rejects that in its next step.
            for item in value.values() if isinstance(value, dict) else [value]:
                is_tensor = isinstance(item, torch.Tensor)
                total.update(tensor_digest(item) if is_tensor else repr(item)[:1000].encode())
        return f"{total.hexdigest()} {self.loader.state_dict()}"


INSERTED = (b"[" * 5000, b"9" * 500, b'"a":1,"a":2,', b"\0" * 64, b"\\u")


def mutate_bytes(draw: random.Random, raw: bytearray) -> None:
    at, end = sorted((draw.randrange(len(raw) + 1), draw.randrange(len(raw) + 1)))
    change: list[Callable[[], Any]] = [
        lambda: raw.__setitem__(slice(at, at + 1), bytes([draw.randrange(256)])),
        lambda: raw.__setitem__(slice(at, end), b""),
        lambda: raw.__setitem__(slice(at, at), raw[at:end]),
        lambda: raw.__setitem__(slice(at, at), draw.randbytes(draw.randrange(1, 40))),
        lambda: raw.__setitem__(slice(at, at), draw.choice(INSERTED)),
        lambda: raw.__setitem__(slice(at, None), b""),
        lambda: raw.__setitem__(slice(0, 8), draw.randbytes(8)),
        lambda: raw.__setitem__(slice(0, 8), (2 ** draw.randrange(64)).to_bytes(8, "little")),
        lambda: raw.__setitem__(slice(None), pickle.dumps(Trap())),
    ]
    draw.choice(change)()


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**40, 2**62, 1.5, "", "..", "../../etc/passwd", "/etc/passwd", "F64", "float64", [], {}, [[]],
    "0 0 99999999 99999999 1", {"tensor": "0.weight"}, {"items": [[1, 2]]}, {"int": "0x" + "f" * 300},
    {"dtype": "torch.int8"}, {"Size": [2**50, 2**50]},
    {"float": "nan"}, {"bytes": "AAAA"}, {"OrderedDict": {"dict": {}}},
)  # fmt: skip


def mutate_values(draw: random.Random, raw: bytearray) -> None:
    """Change a random value, key or entry in a JSON document or header."""
    begin = 8 if raw[8:9] == b"{" and raw[:1] != b"{" else 0
    end = begin + int.from_bytes(raw[:8], "little") if begin else len(raw)
    body = json.loads(bytes(raw[begin:end]))
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [body]
    while todo:
        node = todo.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node))
        places += [(node, key) for key in keys]
        todo += [node[key] for key in keys if isinstance(node[key], dict | list)]
    container, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0 or not isinstance(container, dict):
        container[key] = draw.choice(VALUES)
    elif kind == 1:
        del container[key]
    elif kind == 2:
        container[draw.choice(("", "..", "__metadata__", "x" * 300, "0.weight"))] = container.pop(key)
    else:
        other, other_key = draw.choice(places)
        container[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else other[other_key]))
    text = json.dumps(body).encode()
    raw[:] = (len(text).to_bytes(8, "little") + text + raw[end:]) if begin else text


def update_checksums(folder: Path, name: str) -> None:
    """Correct the size and checksums of the file `name` and the checksum of the manifest."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    for entry in body["files"] if name != "manifest.json" else ():
        if entry["path"] == name:
            raw = (folder / name).read_bytes()
            entry.update(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    digest = hashlib.sha256(strict_json.render(body)).hexdigest()
    path.write_bytes(strict_json.render({**body, "sha256": digest}, indent=1) + b"\n")


def mutate(draw: random.Random, folder: Path) -> tuple[str, bool]:
    """Change one file of a checkpoint; return its name and whether its checksums were forged."""
    name = draw.choice(sorted(path.name for path in folder.iterdir()))
    raw = bytearray((folder / name).read_bytes())
    forged = draw.random() < 0.5
    try:
        (mutate_values if draw.random() < 0.5 else mutate_bytes)(draw, raw)
    except (ValueError, KeyError, RecursionError):  # a cyclic structure, or no value to change
        mutate_bytes(draw, raw)
    (folder / name).write_bytes(raw)
    if forged:
        try:
            update_checksums(folder, name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            forged = False  # too damaged to sign
    return name, forged


@pytest.fixture(scope="module", autouse=True)
def audit_hook() -> None:
    sys.addaudithook(watch)


@pytest.mark.slow
def test_mutated_checkpoint_loads_correctly_or_not_at_all(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.train()
    intact = {}
    for step in (1, 2):  # also imports every module before the audit
        assert job.checkpointer.restore(step) == step
        intact[step] = job.state()
    newest = tmp_path / "run" / "step-00000002"
    shutil.copytree(newest, tmp_path / "whole")
    list(checkpoint_files.inspect(tmp_path / "run", every_byte=True))
    refused = different = 0
    for seed in range(COUNT):
        draw = random.Random(seed)
        name, forged = mutate(draw, newest)
        changed = (newest / name).read_bytes() != (tmp_path / "whole" / name).read_bytes()
        with warnings.catch_warnings(), watched(tmp_path):
            warnings.simplefilter("ignore")
            try:
                step = job.checkpointer.restore()
                loaded, message = job.state(), ""
            except PacelineError as error:
                step, loaded, message = 0, "", str(error)
        assert violations == [], (seed, name)
        assert len(message) < 2000, seed
        if not forged:
            assert (step, loaded) == ((1, intact[1]) if changed else (2, intact[2])), (seed, name)
        refused += step < 2
        different += step == 2 and loaded != intact[2]
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "whole", newest)
    assert refused > COUNT / 2
    assert job.checkpointer.restore() == 2
    assert job.state() == intact[2]
    job.checkpointer.close()
