"""torchelastic's agent for jobs on several hosts, extended so that all hosts report the same cause of a failure.

torchelastic itself handles starts, restarts and the rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from paceline.core.output.messages import say
from paceline.launch.failures import root_cause
from paceline.launch.failures.root_cause import End
from paceline.launch.multi_host import cause
from paceline.launch.watching.rank_processes import RankProcesses


class HostAgent(LocalElasticAgent):
    """Starts the ranks of this host, watches them, and reports why they failed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ends: Sequence[End] = ()
        """How the ranks ended in the latest failed start, on this host and on the host with the cause."""
        self._elsewhere: cause.HostEnds | None = None
        """How the ranks of another host ended, if that host has the cause."""
        self._ranks = RankProcesses({}, {})

    def report(self) -> str:
        """Return the full report of the latest failure, with the headline last."""
        return "\n".join([*root_cause.details(self.ends), f"error: {self._headline()}"])

    def _headline(self) -> str:
        failed = root_cause.failures(self.ends)
        remote, headline = self._elsewhere, root_cause.headline(self.ends)
        if remote is not None and failed and failed[0].rank in {end.rank for end in remote.ends}:
            return f"{headline}, on host {remote.host}"
        return headline

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._ranks.close()
        self._ranks = RankProcesses(
            {ranks[local_rank]: handler.proc for local_rank, handler in context.subprocess_handlers.items()},
            {ranks[local_rank]: path for local_rank, path in context.error_files.items()},
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks
        ranks.poll()
        if ranks.failed():
            # Wait before torchelastic terminates the other ranks, because one of them may have caused the failure.
            ranks.await_cause()
            ranks.signalled.update(ranks.running())
        else:
            ranks.show_slow_errors(say)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            ranks.poll()  # torchelastic has terminated the other ranks
            self._find_cause([*ranks.reported_ends(), *ranks.ends_of_running()])
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self.ends:  # no rank of this host failed: another host restarts, or a host has joined
            self._find_cause(())
        if self.ends:
            say("\n".join([*root_cause.details(self.ends), f"{self._headline()}; starting all ranks again"]))
        self.ends, self._elsewhere = (), None
        super()._restart_workers(worker_group)

    def _find_cause(self, local_ends: Sequence[End]) -> None:
        """Publish why this start failed, or read the cause that another host has published."""
        self.ends, worker_group = local_ends, self.get_worker_group()
        spec, restarts = worker_group.spec, self._remaining_restarts
        store: Any = worker_group.store
        # A dynamic rendezvous already has a store per start, and its hosts may count different numbers of restarts.
        is_static = spec.rdzv_handler.get_backend() == "static"
        place = cause.place(store, spec.max_restarts - restarts if is_static else 0)
        try:
            if cause.is_known(local_ends):
                cause.publish(place, local_ends)
            remote = cause.published(place, cause.HEAR_S if local_ends else 0)
            if remote is not None and not {end.rank for end in remote.ends} & {end.rank for end in local_ends}:
                self.ends, self._elsewhere = [*local_ends, *remote.ends], remote
            if root_cause.usage(self.ends) is not None:
                self._remaining_restarts = 0  # a usage error would occur again
            if local_ends and self._remaining_restarts == 0:
                cause.leave_together(place, worker_group.group_world_size or 1)
        except RuntimeError:  # the store has exited together with its host
            pass
