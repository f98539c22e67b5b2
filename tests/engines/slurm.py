"""A Slurm cluster for tests: slurmctld and two slurmd on this machine, in a folder of their own.

Its munge has a key and a socket of its own, so nothing of the machine's own Slurm or munge is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from processes import TIMEOUT_S, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")
DONE = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")


def missing() -> str:
    """Return why there can be no cluster here; empty if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=search_path()) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)} not found): make test-engines"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def search_path() -> str:
    """Return the search path of jobs, on which `paceline` and `python` are this interpreter's."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])


def environment() -> dict[str, str]:
    """Return the environment of engines: this one, without what a launcher or an engine above pytest has set."""
    left_out = ("OMP_", "PET_", "SLURM_", "OMPI_", "PMI", "COLUMNS", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return clean | {"PATH": search_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an engine to its end."""
    everything = environment() | variables
    return subprocess.run(
        command, cwd=folder, env=everything, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )


class Cluster:
    """Two nodes with eight processors each, as Slurm is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons; returns when both nodes are idle."""
        (self.folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        values = {"DIR": str(self.folder), "HOST": host}
        ports = ("CONTROLLER_PORT", "FIRST_PORT", "SECOND_PORT")
        values |= {name: str(port) for name, port in zip(ports, free_ports(len(ports)), strict=True)}
        template = Path(__file__).with_name("slurm.conf.in").read_text()
        self.configuration.write_text(re.sub(r"@(\w+)@", lambda found: values[found[1]], template))

        key, munge = self.folder / "munge.key", self.folder / "munge.socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment())
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("pid", "log", "seed")]
        # --force: the folder is no one's but root's, as are all who ask.
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}", *files)
        self._wait_until(munge.exists, "no socket of munge")
        self._daemon("slurmctld", "-D", "-f", str(self.configuration))
        for node in (host, f"{host}-second"):
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self.configuration))
        self._wait_until(lambda: self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2, "")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(
                command, env=environment(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._daemons.append(daemon)

    def _wait_until(self, holds: Callable[[], bool], otherwise: str) -> None:
        def holds_yet() -> bool:
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended early\n{self.logs()}"
            return holds()

        until(holds_yet, lambda: f"{otherwise}\n{self.logs()}")

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def stop(self) -> None:
        """Cancel what still runs, and end the daemons."""
        if self._daemons and self._daemons[-1].poll() is None:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.cancel_all()
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def cancel_all(self) -> None:
        """Cancel all jobs; returns when the nodes are idle again."""
        jobs = self.call("squeue", "-h", "-o", "%i").split()
        if jobs:
            self.call("scancel", *jobs)
        self._wait_until(lambda: not self.call("squeue", "-h", "-o", "%i"), "jobs do not end")

    def call(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        """Run one of Slurm's programs, which has to succeed; what it prints."""
        done = self.run(*command, folder=folder, **variables)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def run(self, *command: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs to its end."""
        return run(*command, folder=folder or self.folder, SLURM_CONF=str(self.configuration), **variables)

    def submit(self, folder: Path, *arguments: str) -> Job:
        """Submit a batch job in `folder`."""
        return Job(self, self.call("sbatch", "--parsable", *arguments, folder=folder).strip(), folder)


@dataclass(frozen=True)
class Job:
    """A batch job, or a task of an array; its number as Slurm writes it."""

    cluster: Cluster
    number: str
    folder: Path

    def field(self, name: str) -> str:
        """Return a field of what Slurm knows of the job."""
        [value] = re.findall(rf"\b{name}=(\S*)", self.cluster.call("scontrol", "show", "job", "-o", self.number))
        return str(value)

    def update(self, **fields: str) -> None:
        """Change fields of the job."""
        words = [f"{name}={value}" for name, value in fields.items()]
        self.cluster.call("scontrol", "update", f"JobId={self.number}", *words)

    @property
    def output(self) -> str:
        file = self.folder / f"slurm-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def wait_for(self, *states: str) -> None:
        """Return when the job is in one of `states`; fails if it ends in another."""

        def holds() -> bool:
            state = self.field("JobState")
            assert state in states or state not in DONE, f"{state}, not {states}\n{self.output}\n{self.cluster.logs()}"
            return state in states

        until(holds, lambda: f"not {states}: {self.field('JobState')}\n{self.output}\n{self.cluster.logs()}")

    def wait_for_file(self, name: str) -> None:
        """Return when the job has written the file `name`."""

        def holds() -> bool:
            assert self.field("JobState") not in DONE, f"ended without {name}\n{self.output}"
            return (self.folder / name).exists()

        until(holds, lambda: f"no {name}\n{self.output}\n{self.cluster.logs()}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
