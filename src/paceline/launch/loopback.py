"""Stores for the ranks of one host, which listen on loopback only.

``TCPStore("127.0.0.1", …)`` binds every interface, whatever host it is given, and knows no authentication;
a listening socket that is handed to it keeps its own address.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

from paceline.core.processes.private_store import make_file, path_of
from paceline.core.torch_internals.distributed.c10d import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_listener() -> socket.socket:
    """Listen on a free port of the loopback interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, 0))
    except OSError:
        listener.close()
        raise
    listener.listen(128)
    return listener


def loopback_store(timeout: timedelta = timedelta(minutes=5), listener: socket.socket | None = None) -> TCPStore:
    """Serve a fresh store at `listener`, which is the store's from then on; by default on a free port of loopback.

    The server lives as long as the returned object. Ranks join it as clients, with ``MASTER_ADDR`` and
    ``MASTER_PORT`` (``store.port``) and ``TORCHELASTIC_USE_AGENT_STORE=True``.
    """
    listener = listener or loopback_listener()
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on, hence detach().
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


class LoopbackStores:
    """The stores of one start of the ranks. Each start has fresh ones, so no rank meets the address of a dead one.

    There are two, because every user of the host can write into a TCPStore: :func:`paceline.init` finds the private
    one in ``PACELINE_STORE``, and torch's own functions find the public one in ``MASTER_ADDR`` and ``MASTER_PORT``.
    """

    def __init__(self) -> None:
        self._public = loopback_store()  # serves as long as it is held
        self.port = self._public.port
        self._file = -1
        self.private = ""
        """The value of ``PACELINE_STORE``."""
        if sys.platform == "linux":
            self._file = make_file(str(self.port))
            self.private = f"{self.port} {path_of(self._file)}"

    def close(self) -> None:
        """Release the stores, when the ranks have ended."""
        del self._public
        if self._file >= 0:
            os.close(self._file)
