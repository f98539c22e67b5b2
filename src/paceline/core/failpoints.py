"""Failpoints: named moments when a test can make a rank fail. For tests only.

The environment variable ``PACELINE_FAILPOINTS`` holds orders, separated by semicolons. Each order is a moment with
conditions::

    PACELINE_FAILPOINTS="bucket rank=1 at=5 do=kill; rescue start=0 rank=0"

=========  ===========================================================================================================
``rank``   the rank that fails; every rank by default
``at``     which occurrence of the moment fails the rank: 1 (default) is the first one of the start. Moments inside a
           training step use the step's number instead; the first step of a start is number 1
``start``  number of restarts before this start: 0, the default, is the first start; ``any`` is every start
``do``     ``kill`` (SIGKILL, the default), ``abort`` (SIGABRT), ``raise`` (an exception), ``exit`` (as
           ``sys.exit(0)``), ``stop`` (SIGSTOP), or a number of seconds to sleep
=========  ===========================================================================================================

=================  ===================================================================================================
moment             a rank reaches it
=================  ===================================================================================================
``rendezvous``     before the process group is created
``forward``        in the forward of Paceline's wrapper, in training mode
``bucket``         between the launches of two buckets
``prepared``       between reduction and optimizer step, before the gate
``gate``           between reduction and optimizer step, after the gate
``optimizer``      inside the optimizer; called by a script
``gather``         while the ranks' shares are being gathered
``evaluation``     between two steps; called by a script
``sample``         while a DataLoader worker fetches a sample; called by a script
``stepped``        after the optimizer, before the end of the step
``boundary``       after the end of the step
``write``          in the middle of writing a checkpoint's files, on disk or in memory
``before-rename``  before a complete checkpoint gets its final name
``after-rename``   after it got its final name
``rescue``         before a rescued checkpoint is written
``restore``        after some of the objects have been restored
=================  ===================================================================================================

The variable is read once, at import.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

from paceline.core.torch_internals import never_compiled

VARIABLE = "PACELINE_FAILPOINTS"
DEFAULTS = {"rank": "any", "at": "1", "start": "0", "do": "kill"}
orders = [order for order in os.environ.get(VARIABLE, "").split(";") if order.strip()]
"""This process's orders."""
_times: Counter[str] = Counter()
"""How often each moment has been reached."""


class Struck(Exception):
    """The exception that a failpoint raises."""


@never_compiled
def strike(moment: str) -> None:
    """Make this rank fail if an order is due at `moment`."""
    if not orders:
        return
    _times[moment] += 1
    rank, start = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for order in orders:
        name, *settings = order.split()
        conditions = DEFAULTS | dict(setting.split("=") for setting in settings)
        is_time = (name, int(conditions["at"])) == (moment, _times[moment]) and conditions["start"] in ("any", start)
        if is_time and conditions["rank"] in ("any", rank):
            _act(conditions["do"], f"a failpoint strikes rank {rank} at {moment!r}")


def _act(action: str, reason: str) -> None:
    if action == "raise":
        raise Struck(reason)
    if action == "exit":
        raise SystemExit(0)
    if action == "abort":
        os.abort()
    if action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    else:
        time.sleep(float(action))
