"""A rendezvous store for one host, which listens on loopback only.

``TCPStore("127.0.0.1", …)`` binds every interface, whatever host it is given, and knows no authentication;
a listening socket that is handed to it keeps its own address.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from paceline.core.torch_internals.distributed.c10d import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_listener(port: int = 0) -> socket.socket:
    """Listen on `port` of the loopback interface, by default a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # connections of the job before, which have ended, keep it for a minute
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
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
