"""The ``paceline`` command in tests: real processes with a hard timeout that never outlive the test.

    done = paceline(folder, "run", "--nproc", "2", "script.py")      wait until it exits
    with Running(folder, "run", …) as job:                           interact while it runs
        job.wait_for("ready-0", "ready-1")

Commands run in `folder` with a separate temporary directory, which must be empty when they exit. `fork` selects the
processes that are forked from an interpreter with torch imported (:mod:`forked`): only the command ("launcher"), the
command and its ranks ("all"), or neither ("nothing"). A `program` replaces the command: a script's path and arguments,
or "-c", code and arguments. It starts as a new process unless ``fork="all"``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from insides import failpoints, guard

TIMEOUT_S = 300.0  # reached only by a hanging command or on a very busy machine


def script(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script into `folder` and return its name."""
    (folder / name).write_text(text)
    return name


def paceline(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command with the options of :class:`Running` until it exits; check that it left no temporary files."""
    with Running(folder, *arguments, **options) as job:
        code = job.wait()
        return subprocess.CompletedProcess(arguments, code, job.stdout, job.stderr)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run the command in this process and return its exit code."""
    from insides import main

    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


class Running:
    """A ``paceline`` command that is killed at the end of the block."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: tuple[str, ...] = (),
        fork: str = "launcher",
        first: Callable[[], None] | None = None,
        **environment: str,
    ) -> None:
        """A forked command calls `first` before anything else."""
        self.folder = folder
        # Not in `folder`, whose path is long: socket paths have at most 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.temporary = Path(self._temporary.name)
        self.torchs = folder / "torch"  # torch creates it with the first optimizer, by default in TMPDIR
        # COLUMNS: xdist passes the width of pytest's terminal to its workers, but a pipe has no width.
        left_out = ("OMP_", "PET_", "COLUMNS")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        clean |= {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.torchs), **environment}
        files = [folder / "stdout", folder / "stderr"]
        for file in files:
            file.write_text("")
        self.process: Forked | subprocess.Popen[bytes]
        if fork == "all" or (fork == "launcher" and not program):
            command = [*(program or ("-m", "paceline")), *arguments]
            self.process = Forked(command, folder, clean, files[0], files[1], ranks=fork == "all", first=first)
            return
        with files[0].open("a") as out, files[1].open("a") as err:
            self.process = subprocess.Popen(
                [sys.executable, *(program or ("-m", "paceline")), *arguments],
                cwd=folder,
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def leftovers(self) -> list[str]:
        return sorted(os.listdir(self.temporary))

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Return the exit code; fail if the command takes longer than `timeout` seconds."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.stdout}\n{self.stderr}") from None
        assert not self.leftovers, self.leftovers
        return code

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have written the files `names` into the folder."""
        self.wait_until(lambda: all((self.folder / name).exists() for name in names), f"no {names}")

    def wait_for_pids(self, *names: str) -> list[int]:
        """Wait until the ranks have written process ids to the files `names` in the folder; return them."""
        files = [self.folder / name for name in names]
        self.wait_until(lambda: all(file.exists() and file.read_text() for file in files), f"no {names}")
        return [int(file.read_text()) for file in files]

    def wait_for_error(self, text: str) -> None:
        """Wait until the command or a rank has written `text` to stderr."""
        self.wait_until(lambda: text in self.stderr, f"no {text!r}")

    def wait_until(self, holds: Callable[[], bool], otherwise: str) -> None:
        """Wait until `holds()` returns true; fail if the command exits first or after a timeout."""

        def holds_yet() -> bool:
            running = self.process.poll() is None
            assert holds() or running, f"ended early: {otherwise}\n{self.stdout}\n{self.stderr}"
            return holds()

        until(holds_yet, lambda: f"{otherwise} after {TIMEOUT_S} s\n{self.stderr}")

    def family(self) -> list[int]:
        """Return the process ids of the launcher and its descendants, except its guard."""
        return [self.process.pid, *descendants(self.process.pid)]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in reversed(self.family()) if self.process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._temporary.cleanup()


def strike(orders: str) -> None:
    """Arm failpoints in a forked command, as its `first`: the import that reads their orders has already happened."""
    failpoints.orders += orders.split(";")


def until(holds: Callable[[], bool], otherwise: Callable[[], str] = str) -> None:
    """Wait until `holds()` returns true; fail only after a time that no slow machine needs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


def descendants(parent: int) -> list[int]:
    """Return the process ids of all running descendants, except guards, which exit by themselves."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                after_name = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(after_name[1]), []).append(int(entry))
    result, todo = [], [parent]
    while todo:
        below = children.get(todo.pop(), [])
        result += below
        todo += below
    return [pid for pid in result if not is_guard(pid)]


def is_guard(pid: int) -> bool:
    """Return whether the process is a guard, which cleans up after a killed launcher."""
    try:
        return guard.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """Return the kernel's one-letter state of the process; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone_after(pids: list[int], limit: float) -> None:
    """Wait until none of `pids` is alive; fail after `limit` seconds."""
    begin = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() - begin < limit, f"still alive after {limit} s: {list(filter(alive, pids))}"
        time.sleep(0.02)
