"""Ranks that call functions, possibly many in a row (for example, in property tests).

    run_ranks(2, function, argument)        the result of each rank, or the first rank's error with its traceback
    with Ranks(2) as ranks:                 the same processes for many calls
        ranks.run(function, argument)
    with Pools() as pools:                  the same, for any number of ranks
        pools.run(2, function, argument)

A function is called as ``function(world, *arguments)`` and must be at the top level of a module. A fork server that has
imported torch starts the processes in milliseconds. Every world has a store on a free loopback port. To run a whole
test on ranks, use the marker.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.core.torch_elastic import OPTIMIZERS_NEED
from paceline.core.world import World, init
from paceline.launch.fork_client import LIBRARY
from paceline.launch.job import loopback_store
from paceline.testing.rank_processes import ask_for_stacks, environment, stack_of, stacks_on_request

TIMEOUT_S = 120.0
ECHO_S = 1.0
"""Seconds to wait, after each failure, for another rank to fail as well."""
STACK_S = 5.0
"""Seconds to wait for a rank to write its stack, which it never does while it is blocked in C."""
fork_server = multiprocessing.get_context("forkserver")
PRELOADED = ("torch", "torch.distributed", OPTIMIZERS_NEED, *LIBRARY)


def preload(*modules: str) -> None:
    """Make the fork server also import `modules`. Call this before the first rank starts."""
    fork_server.set_forkserver_preload([*PRELOADED, *modules])


preload()


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """A world of `size` processes that live for several calls."""

    warnings_are_errors: ClassVar[bool] = False
    """Whether warnings are errors in new ranks. Does not apply to the ranks marker, which follows pytest's settings."""

    def __init__(self, size: int, timeout: float = TIMEOUT_S, backend: str | None = None) -> None:
        self.size = size
        self.timeout = timeout
        self._store = loopback_store()
        self._folder = tempfile.TemporaryDirectory()
        """Folder for the stacks that ranks write."""
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            parent_end, rank_end = fork_server.Pipe()
            process = fork_server.Process(
                target=_serve,
                args=(rank, size, self._store.port, backend, timeout, self._folder.name, rank_end),
                kwargs={"warnings_are_errors": self.warnings_are_errors},
                # A daemonic process may not have children, such as workers of a DataLoader.
                daemon=False,
            )
            process.start()
            rank_end.close()  # otherwise the pipe would stay open after the rank has ended
            self._pipes.append(parent_end)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(world, *arguments)` on every rank, and return the results in rank order."""
        if not self._pipes:
            raise RankFailed("the ranks have ended because an earlier call failed")
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        failures: list[str] = []
        silent = list(range(self.size))
        deadline = time.monotonic() + self.timeout
        while silent and (ready := wait([self._pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank in silent if self._pipes[rank] in ready]:
                silent.remove(rank)
                ok, value = self._receive(rank)
                if ok:
                    results[rank] = value
                else:  # the failure may be a consequence of another rank's failure
                    failures.append(value)
                    deadline = time.monotonic() + ECHO_S
        if silent or failures:
            failures = failures or [f"ranks {silent} did not answer within {self.timeout:.0f} s"]
            message = "\n".join([*failures, *self._stacks_of(silent)])
            self.kill()
            raise RankFailed(message)
        return [results[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Return whether the function succeeded on `rank`, with its result or a description of the failure."""
        try:
            ok, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return False, f"rank {rank} died with exit code {self.processes[rank].exitcode}"
        return ok, value if ok else f"rank {rank} raised:\n{value}"

    def _stacks_of(self, ranks: list[int]) -> list[str]:
        """Return the stacks of `ranks`, which their main threads write after a signal."""
        folder = Path(self._folder.name)
        ask_for_stacks(folder, {rank: self.processes[rank].pid for rank in ranks}, STACK_S)
        stacks = {rank: stack_of(folder, rank) for rank in ranks}
        return [f"rank {rank} did not answer, and is here:\n{stack}" for rank, stack in stacks.items() if stack]

    def kill(self) -> None:
        """Kill every rank immediately."""
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Stop the ranks, and kill them if necessary."""
        for pipe in self._pipes:
            pipe.close()  # this makes the rank exit
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self.processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pools:
    """Ranks by world size, started at the first call and again after a failure."""

    def __init__(self, backend: str | None = None, timeout: float = TIMEOUT_S) -> None:
        self.backend, self.timeout = backend, timeout
        self._pools: dict[int, Ranks] = {}

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(world, *arguments)` on `size` ranks, and return the results in rank order."""
        pool = self._pools.get(size)
        if pool is None or not pool.processes:
            pool = self._pools[size] = Ranks(size, self.timeout, self.backend)
        return pool.run(function, *arguments)

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


def run_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_S, backend: str | None = None
) -> list[Any]:
    """Call `function(world, *arguments)` once on each of `size` new ranks, and return the results in rank order."""
    with Ranks(size, timeout, backend) as ranks:
        return ranks.run(function, *arguments)


def plain_start_method() -> None:
    """Make DataLoader workers start with the platform's method; a fork server's child would use a fork server."""
    multiprocessing.set_start_method(None, force=True)


def _serve(
    rank: int,
    size: int,
    port: int,
    backend: str | None,
    timeout: float,
    folder: str,
    pipe: Connection,
    *,
    warnings_are_errors: bool,
) -> None:
    """Run a rank: join the process group, and answer calls until the pipe closes."""
    gc.freeze()  # a garbage collection would copy the memory of all modules that the fork server has loaded
    os.environ.update(environment(rank, size, port))
    if warnings_are_errors:
        warnings.simplefilter("error")
        # Tests give all ranks the same inputs on purpose; see pyproject.toml.
        warnings.filterwarnings("ignore", message="the inputs of the first forward are the same on all")
    plain_start_method()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)  # Python 3.12
    torch.set_num_threads(1)
    world: World | None = None
    try:
        with stacks_on_request(Path(folder), rank):
            while True:
                answer: tuple[bool, Any]
                try:
                    # Unpickle only below, so that an unknown function fails the call, not the rank.
                    call = pipe.recv_bytes()
                except EOFError:
                    break
                try:
                    function, arguments = pickle.loads(call)
                    if world is None:
                        # Shorter than the caller's timeout, so that a hang ends with torch's message.
                        world = init(backend, timeout=timedelta(seconds=timeout * 0.8))
                    answer = (True, function(world, *arguments))
                # Including SystemExit and pytest's outcomes, because the caller waits for an answer.
                except BaseException:
                    answer = (False, traceback.format_exc())
                try:
                    pipe.send(answer)
                except Exception:
                    # The result cannot be pickled; send() has not sent any of it.
                    pipe.send((False, traceback.format_exc()))
    finally:
        if world is not None:
            # Skip destroy_process_group(), because a peer may be gone.
            os._exit(0)
