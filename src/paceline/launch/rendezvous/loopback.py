"""The stores of a job on one host, fresh for every start of its ranks."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.core.processes.private_store import make_file, path_of
from paceline.core.torch_internals.distributed.c10d import HashStore, TCPStore
from paceline.launch.rendezvous.store import LOOPBACK, loopback_listener, loopback_store


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one host: each start gets fresh stores, so no rank meets the address of a dead one.

    There are three, because every user of the host can write into a TCPStore: the agent's own stays in this process,
    :func:`paceline.init` finds the private one in ``PACELINE_STORE``, and torch's own functions find the public one
    in ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        run_id: the job's name.
        port: the port of the public store; 0 for a free one.
    """

    private: str
    """The value of ``PACELINE_STORE`` for the ranks of this start."""
    _file: int
    """Descriptor of the private store's memory file, or -1."""
    _public: TCPStore | None
    """Serves as long as it is held."""

    def __init__(self, run_id: str, port: int = 0) -> None:
        self._run_id, self._port = run_id, port
        self.private, self._file, self._public = "", -1, None

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "paceline-loopback"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the launcher's store; no rank serves one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return fresh stores, after releasing those of the previous start."""
        self.shutdown()
        self._public = loopback_store(listener=loopback_listener(self._port))
        if sys.platform == "linux":
            self._file = make_file(str(self._public.port))
            self.private = f"{self._public.port} {path_of(self._file)}"
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._public.port))

    def is_closed(self) -> bool:
        """Return False: the launcher is the only participant."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other host ever joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's name, in the ranks' ``TORCHELASTIC_RUN_ID``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Release the stores; the ranks have ended."""
        if self._file >= 0:
            os.close(self._file)
        self.private, self._file, self._public = "", -1, None
        return True
