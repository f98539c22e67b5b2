"""How a rank ends, alone and under the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.errors import CommunicationError, DesyncError, WorldError
from paceline.launch import failure_record
from processes import paceline, script


def test_record_round_trip_and_torch_error_files(tmp_path: Path) -> None:
    path = str(tmp_path / "error.json")
    note = failure_record.Record("ValueError: x", "Traceback …", 1234.5, usage=True)
    failure_record.write(path, note)
    assert failure_record.read(path) == note
    content = json.loads(Path(path).read_text())
    for ours in ("at", "usage"):
        del content[ours]
    Path(path).write_text(json.dumps(content))
    assert failure_record.read(path) == failure_record.Record("ValueError: x", "Traceback …", 1234.0)


def through(*errors: BaseException) -> BaseException:
    """Return the last of `errors`, each raised while handling its predecessor."""
    last: BaseException | None = None
    for error in errors:
        error.__context__ = last
        last = error
    assert last is not None
    return last


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17325"
CONSEQUENCES = {
    "our own": (CommunicationError("a rank ended").because_of([2]), (2,)),
    "our own without names": (CommunicationError("a rank ended"), ()),
    "another's backward ended": (DesyncError("backward was ended on rank 1").because_of([1]), (1,)),
    "Gloo's": (RuntimeError(GLOO), ()),
    "Gloo's time-out": (
        RuntimeError(GLOO.replace("Connection closed by peer", "Timed out waiting 500ms for recv")),
        (),
    ),
    "a store's": (dist.DistStoreError("wait timeout after 500ms, keys: /default_pg/0//0"), ()),
    "a socket's": (dist.DistNetworkError("failed to recv, got 0 bytes"), ()),
    "raised while a lost peer was handled": (through(CommunicationError("x").because_of([3]), KeyError("y")), (3,)),
    "an error of its own": (ValueError("x"), None),
    "ranks out of step": (DesyncError("ranks differ"), None),
    "a file server's": (ConnectionResetError(104, "Connection reset by peer"), None),
    "a script's about its own connection": (RuntimeError("download failed: connection reset"), None),
    "Gloo's of sizes that differ": (RuntimeError("[enforce fail at gloo/pair.cc:4] op.nbytes. 4000 vs 400"), None),
}


@pytest.mark.parametrize(("error", "blamed"), CONSEQUENCES.values(), ids=CONSEQUENCES)
def test_consequences_are_recognized_by_class(
    error: BaseException, blamed: tuple[int, ...] | None, tmp_path: Path
) -> None:
    # Paceline's own messages did not match the patterns, so ranks that lost a peer were blamed for its death.
    path = str(tmp_path / "error.json")
    failure_record.write(path, failure_record.of(error))
    note = failure_record.read(path)
    assert note is not None
    assert note.blamed == blamed


def test_consequence_is_never_a_usage_error() -> None:
    # On waiting ranks main_first raises a WorldError, which is a UsageError; it hid the error of rank 0.
    assert not failure_record.of(WorldError("the block failed on rank 0").because_of([0])).usage


def test_truncated_records_are_ignored_and_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert failure_record.read(str(path)) is None
    for text in ("", '{"message": {"mess', "[]", "{}", '{"message": {}}'):
        path.write_text(text)
        assert failure_record.read(str(path)) is None
    failure_record.write(os.path.join(str(tmp_path), "no", "folder"), failure_record.of(ValueError("x")))


TURNS = """
import os, torch, paceline
world = paceline.init()
torch.manual_seed(3)
wrappers = paceline.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel
models = [wrapper(torch.nn.Linear(2, 1)) for wrapper in wrappers]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
checkpointer = paceline.Checkpointer("saved")
for name, part in zip("abcd", [*models, *optimizers]):
    checkpointer.register(name, part)
step = checkpointer.restore() if checkpointer.steps() else 0
strike = {"0": 3, "1": 8, "2": 15}.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
while step < 16:
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step + 1 == strike and world.rank == 1:
        raise ValueError(f"in step {strike}")
    step = checkpointer.step()
checkpointer.close()
"""


@pytest.mark.slow
def test_step_counts_across_restarts_and_alternating_optimizers(tmp_path: Path) -> None:
    # It restarted from 1, and counted twice for two optimizers; with torch's wrapper it was always 1.
    done = paceline(tmp_path, "run", "--nproc", "2", "--report", "report.json", script(tmp_path, TURNS), fork="all")
    assert done.returncode == 0, done.stderr
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert [failure["first"]["step"] for failure in failures] == [3, 8, 15]
    assert "in step 15, in the script's own code" in done.stderr
