"""A Slurm cluster for tests: slurmctld and two slurmd on this machine, in a separate folder.

Its munge has a separate key and socket, so an installed Slurm or munge is not touched.
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
    """Return why a cluster cannot run here; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=search_path()) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)} not found): make test-engines"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def search_path() -> str:
    """Return the search path of jobs, which finds `paceline` and `python` of this interpreter."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])


def environment() -> dict[str, str]:
    """Return this environment for engines, without variables set by a launcher or engine above pytest."""
    left_out = ("OMP_", "PET_", "SLURM_", "OMPI_", "PMI", "COLUMNS", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return clean | {"PATH": search_path(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an engine to completion."""
    everything = environment() | variables
    return subprocess.run(
        command, cwd=folder, env=everything, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )


class Cluster:
    """Two nodes, configured with eight processors each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons; return when both nodes are idle."""
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
        # --force: only root can write to the folder, and only root uses the socket.
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
        """Return the tails of the daemon logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)

    def stop(self) -> None:
        """Cancel the running jobs, and end the daemons."""
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
        """Cancel all jobs; return when the nodes are idle again."""
        jobs = self.call("squeue", "-h", "-o", "%i").split()
        if jobs:
            self.call("scancel", *jobs)
        self._wait_until(lambda: not self.call("squeue", "-h", "-o", "%i"), "jobs do not end")

    def call(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        """Run a Slurm program, which must succeed, and return its output."""
        done = self.run(*command, folder=folder, **variables)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def run(self, *command: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a Slurm program to completion."""
        return run(*command, folder=folder or self.folder, SLURM_CONF=str(self.configuration), **variables)

    def submit(self, folder: Path, *arguments: str) -> Job:
        """Submit a batch job in `folder`."""
        return Job(self, self.call("sbatch", "--parsable", *arguments, folder=folder).strip(), folder)


@dataclass(frozen=True)
class Job:
    """A batch job or an array task, with its number as written by Slurm."""

    cluster: Cluster
    number: str
    folder: Path

    def field(self, name: str) -> str:
        """Return a field of the job in Slurm's database."""
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
        """Return when the job is in one of `states`; fail if it ends in another."""

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
    """Return currently unused ports."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for port in sockets:
            port.bind(("127.0.0.1", 0))
        return [int(port.getsockname()[1]) for port in sockets]
    finally:
        for port in sockets:
            port.close()
