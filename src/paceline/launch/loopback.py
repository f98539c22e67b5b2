"""Stores for the ranks of one host. They listen only on loopback.

``TCPStore("127.0.0.1", …)`` listens on every interface, without authentication, unless it is given a listening socket.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import TCPStore

from paceline.core.processes.private_store import make_file, path_of

LOOPBACK = "127.0.0.1"


def loopback_listener() -> socket.socket:
    """Listen on a free port of the loopback interface."""
    return socket.create_server((LOOPBACK, 0), backlog=128)


def loopback_store(listener: socket.socket | None = None) -> TCPStore:
    """Serve a new store on `listener`, taking it over, or on a free loopback port.

    The server lives as long as the returned object. Ranks connect as clients: they get ``MASTER_ADDR``, ``MASTER_PORT``
    (``store.port``) and ``TORCHELASTIC_USE_AGENT_STORE=True``.
    """
    listener = listener or loopback_listener()
    port = listener.getsockname()[1]
    # detach(), because the store takes ownership of the descriptor
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class LoopbackStores:
    """The stores for one start of the ranks. A store from the previous start would hold the addresses of dead ranks.

    There are two stores, because every user of the host can write to a TCPStore. :func:`paceline.init` uses the private
    store, given in ``PACELINE_STORE``. torch's functions use the public store, given in ``MASTER_ADDR`` and
    ``MASTER_PORT``.
    """

    def __init__(self) -> None:
        self._public = loopback_store()
        self.port = self._public.port
        self._file = -1
        self.private = ""
        """The value of ``PACELINE_STORE``."""
        if sys.platform == "linux":
            self._file = make_file(str(self.port))
            self.private = f"{self.port} {path_of(self._file)}"

    def close(self) -> None:
        """Close the stores. Call this after the ranks have exited."""
        del self._public
        if self._file >= 0:
            os.close(self._file)
