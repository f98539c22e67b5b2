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

The variable is read once, at import. Without it, a failpoint only calls an empty function.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "PACELINE_FAILPOINTS"


class Struck(Exception):
    """The exception that a failpoint raises."""


@dataclass(frozen=True)
class Order:
    """An instruction to make a rank fail at a moment."""

    moment: str
    rank: str = "any"
    at: str = "1"
    start: str = "0"
    do: str = "kill"

    @classmethod
    def of(cls, text: str) -> Order:
        """Return the order that `text` describes."""
        moment, *settings = text.split()
        return cls(moment, **dict(setting.split("=") for setting in settings))

    def is_due(self, moment: str, rank: str, at: int, start: str) -> bool:
        """Return whether the order is due when `rank` reaches `moment` for the `at`-th time in this `start`."""
        is_time = (moment, at) == (self.moment, int(self.at)) and self.start in ("any", start)
        return is_time and self.rank in ("any", rank)


class Striker:
    """Carries out `orders` in this process."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders
        self._times: Counter[str] = Counter()
        """How often each moment has been reached."""

    def strike(self, moment: str) -> None:
        """Strike this rank if an order is due at `moment`."""
        self._times[moment] += 1
        rank, start = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        for order in self._orders:
            if order.is_due(moment, rank, self._times[moment], start):
                _act(order.do, f"a failpoint strikes rank {rank} at {moment!r}")


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


def pass_by(moment: str) -> None:
    """Replaces :meth:`Striker.strike` if the variable holds no orders."""


_orders = [Order.of(text) for text in os.environ.get(VARIABLE, "").split(";") if text.strip()]
strike = Striker(_orders).strike if _orders else pass_by
