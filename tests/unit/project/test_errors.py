"""Shared parts of error messages, and how errors end a script."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from insides import failure_callbacks
from paceline.errors import MissingExtra, PacelineError, UsageError, WorldError, WrapError
from processes import paceline

CLONE = {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}}
COPY = {"url": "file:///home/me/clone", "dir_info": {}}
WHEEL = {"url": "file:///tmp/paceline-0.1.0-py3-none-any.whl", "archive_info": {}}
COMMIT = {"url": "https://host/paceline.git", "vcs_info": {"vcs": "git", "commit_id": "4002d00"}}
ORIGINS = {
    "an index": (None, "run: pip install 'paceline[wandb]'"),
    "a clone": (CLONE, "in /home/me/my clone run: pip install -e '.[wandb]'"),
    "a copy of a clone": (COPY, "run: pip install 'paceline[wandb] @ file:///home/me/clone'"),
    "a wheel": (WHEEL, f"run: pip install 'paceline[wandb] @ {WHEEL['url']}'"),
    "a commit": (COMMIT, "run: pip install 'paceline[wandb] @ git+https://host/paceline.git'"),
}


@pytest.mark.parametrize(("origin", "words"), ORIGINS.values(), ids=ORIGINS)
def test_the_remedy_for_a_missing_package_matches_how_paceline_was_installed(
    origin: dict[str, Any] | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # «pip install 'paceline[wandb]'» fails for a clone, because no index has that name.
    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if origin is not None and name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert str(MissingExtra("wandb", "wandb", "--wandb")).endswith(f", which is not installed; {words}")


SCRIPT = """
import os, sys, torch, paceline
if "hook" in sys.argv:
    sys.excepthook = lambda *_: print("mine")
world = paceline.init()
if "saving" in sys.argv:
    from paceline.core import failure_callbacks
    failure_callbacks.at_failure(lambda error: print("saved", flush=True))
    if not os.fork():  # a forked child has nothing to save
        failure_callbacks._call_functions(KeyError())
        os._exit(0)
if "other" in sys.argv:
    raise ValueError("x")
paceline.DistributedDataParallel(torch.nn.Flatten())
"""


ONE_LINE = "error: the module has no parameter that requires a gradient"


@pytest.mark.parametrize(
    ("given", "code", "out", "first"),
    [
        ("saving", 2, "saved\n", ONE_LINE),  # test_public_names.py covers a separate interpreter
        ("hook", 1, "mine\n", ""),
        ("other", 1, "", "[rank0]: Traceback"),
    ],
)
def test_a_mistake_in_a_plain_script_is_one_line(tmp_path: Path, given: str, code: int, out: str, first: str) -> None:
    # It was a traceback, with exit code 1.
    (tmp_path / "train.py").write_text(SCRIPT)
    done = paceline(tmp_path, program=("train.py", given), fork="all")
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert done.stderr.startswith(first)
    if code == 2:
        assert done.stderr.endswith("train.py, line 14)\n")
        assert done.stderr.count("\n") == 1


class Ended(RuntimeError):
    """A consequence of another rank's end."""

    blamed = ()


def raised(error: BaseException, origin: BaseException | None = None) -> BaseException:
    """Return `error` after raising it here from `origin`."""
    try:
        raise error from origin
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "is_one_line"),
    [
        (UsageError("x"), True),
        (WrapError("x"), True),
        (raised(WorldError("x"), ValueError("y")), True),
        (PacelineError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_only_usage_errors_of_the_script_end_in_one_line(
    error: BaseException, is_one_line: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: shown.append(error))
    if is_one_line:
        with pytest.raises(SystemExit, match="2"):
            failure_callbacks.show(type(error), error, error.__traceback__)
        assert capfd.readouterr().err.startswith("error: x")
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # interactive mode, where a mistake does not end Python
    failure_callbacks.show(type(error), error, error.__traceback__)
    assert shown == [error]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (raised(WorldError("x").because_of([0])), "error: WorldError: x ("),
        (raised(UsageError("x"), Ended("y")), "error: Ended: y ("),
    ],
)
def test_a_consequence_of_another_ranks_failure_is_one_line_and_not_the_root_cause(
    error: BaseException, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Under torchrun every rank that lost a peer printed a traceback, and the first was named as the root cause.
    monkeypatch.setenv(failure_callbacks.ERROR_FILE, str(tmp_path / "error.json"))
    failure_callbacks.show(type(error), error, error.__traceback__)
    [shown] = capsys.readouterr().err.splitlines()
    assert shown.startswith(line + __file__)
    theirs = ProcessFailure(1, 2, 1, str(tmp_path / "error.json"))
    killed = ProcessFailure(0, 1, -9, "")
    assert theirs.message["extraInfo"]["py_callstack"] in shown
    assert ChildFailedError("train.py", {1: theirs, 0: killed}).get_first_failure() == (0, killed)


@pytest.mark.parametrize(("first", "second"), [(ValueError("x"), RuntimeError("y")), (RuntimeError("x"), Ended("y"))])
def test_torchruns_root_cause_is_the_error_least_likely_to_be_a_consequence(
    first: Exception, second: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a rank that lost its peer, Gloo raises a RuntimeError.
    failures = {}
    for rank, error in enumerate((raised(second), raised(first))):
        path = tmp_path / str(rank)
        monkeypatch.setenv(failure_callbacks.ERROR_FILE, str(path))
        failure_callbacks.show(type(error), error, error.__traceback__)
        failures[rank] = ProcessFailure(rank, 1, 1, str(path))
    assert ChildFailedError("train.py", failures).get_first_failure() == (1, failures[1])
    summary = failures[1].message["extraInfo"]["py_callstack"]  # without the traceback, which is on the rank's stderr
    assert summary.startswith(f"{type(first).__name__}: x ({__file__}, line ")
