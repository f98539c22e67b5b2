"""torchelastic's agent on each of several hosts, which all report the same cause of a failure.

Starts, restarts and the rendezvous are torchelastic's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from paceline.core.output.messages import say
from paceline.launch.failures import root_cause
from paceline.launch.failures.reported_errors import SlowErrors, await_cause, with_report
from paceline.launch.failures.root_cause import End
from paceline.launch.multi_host import cause


class HostAgent(LocalElasticAgent):
    """Starts the ranks of this host, watches them, and reports why they failed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ends: Sequence[End] = ()
        """How ranks of this host and of the host with the cause ended in the latest failed start."""
        self._elsewhere: cause.HostEnds | None = None
        """The cause, if it is on another host."""
        self._ended: dict[int, End] = {}
        """How ranks of this host ended by themselves in the current start, by local rank."""
        self._slow = SlowErrors(say)

    def report(self) -> str:
        """Return the full report of the latest failure, with the headline last."""
        return "\n".join([*root_cause.details(self.ends), f"error: {self._headline()}"])

    def _headline(self) -> str:
        failed = root_cause.failures(self.ends)
        other, headline = self._elsewhere, root_cause.headline(self.ends)
        if other is not None and failed and failed[0].rank in {end.rank for end in other.ends}:
            return f"{headline}, on host {other.host}"
        return headline

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ended, self._slow = {}, SlowErrors(say)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._poll()
        if any(end.code for end in self._ended.values()):
            # Before torchelastic ends the other ranks, because one of them may have caused the failure.
            await_cause(self._reported_ends, self._ends_of_running, self._poll_later)
        else:
            self._slow.show({self._rank(local): self._error_file(local) for local in self._running()})
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._find_cause(self._outcome())
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self.ends:  # no rank of this host failed: another host restarts, or has joined
            self._find_cause(())
        if self.ends:
            say("\n".join([*root_cause.details(self.ends), f"{self._headline()}; starting all ranks again"]))
        self.ends, self._elsewhere = (), None
        super()._restart_workers(worker_group)

    def _find_cause(self, local_ends: Sequence[End]) -> None:
        """Publish why this start failed, or read it from another host."""
        self.ends, worker_group = local_ends, self.get_worker_group()
        spec, restarts = worker_group.spec, self._remaining_restarts
        store: Any = worker_group.store
        # The store of a dynamic rendezvous has a part for each start, and hosts may differ in their restarts.
        is_static = spec.rdzv_handler.get_backend() == "static"
        place = cause.place(store, spec.max_restarts - restarts if is_static else 0)
        try:
            if cause.is_known(local_ends):
                cause.publish(place, local_ends)
            other = cause.published(place, cause.HEAR_S if local_ends else 0)
            if other is not None and not {end.rank for end in other.ends} & {end.rank for end in local_ends}:
                self.ends, self._elsewhere = [*local_ends, *other.ends], other
            if root_cause.usage(self.ends) is not None:
                self._remaining_restarts = 0  # a user's mistake would recur
            if local_ends and self._remaining_restarts == 0:
                cause.leave_together(place, worker_group.group_world_size or 1)
        except RuntimeError:  # the store has ended together with its host
            pass

    # watch

    def _poll(self) -> None:
        """Note which ranks have ended."""
        for local_rank in self._running():
            code = self._handlers()[local_rank].proc.poll()
            if code is not None:
                self._ended[local_rank] = End(self._rank(local_rank), code, time.time())

    def _poll_later(self) -> None:
        time.sleep(0.02)
        self._poll()

    def _reported_ends(self) -> list[End]:
        return [self._with_record(local_rank, end) for local_rank, end in self._ended.items()]

    def _ends_of_running(self) -> list[End]:
        return [self._end_of(local_rank, stopped=True) for local_rank in self._running()]

    def _outcome(self) -> list[End]:
        """Return how the ranks of this host ended; ranks that torchelastic ended count as stopped."""
        has_failed = any(end.code for end in self._ended.values())
        for local_rank in self._running():
            self._ended[local_rank] = self._end_of(local_rank, stopped=has_failed)
        return self._reported_ends()

    def _end_of(self, local_rank: int, stopped: bool) -> End:
        """Return the end of a rank that is or will be stopped."""
        code = self._handlers()[local_rank].proc.returncode
        return self._with_record(
            local_rank, End(self._rank(local_rank), 1 if code is None else code, time.time(), stopped)
        )

    def _with_record(self, local_rank: int, end: End) -> End:
        return with_report(end, self._error_file(local_rank))

    def _running(self) -> list[int]:
        return [local_rank for local_rank in self._handlers() if local_rank not in self._ended]

    def _handlers(self) -> dict[int, Any]:
        return self._pcontext.subprocess_handlers if self._pcontext is not None else {}  # type: ignore[attr-defined]

    def _error_file(self, local_rank: int) -> str:
        assert self._pcontext is not None
        return str(self._pcontext.error_files[local_rank])

    def _rank(self, local_rank: int) -> int:
        return int(self.get_worker_group().workers[local_rank].global_rank)
