"""Failpoints: moments at which a test can make a rank fail. For tests only.

The environment variable ``PACELINE_FAILPOINTS`` holds orders, separated by semicolons: a moment, with conditions::

    PACELINE_FAILPOINTS="bucket rank=1 at=5 do=kill; rescue start=0 rank=0"

=========  ===========================================================================================================
``rank``   the rank that is struck; every rank by default
``at``     number of times that it has come to the moment, in one start; 1 by default. For moments of a training step
           this is the number of the step, counted from the first step of this start
``start``  how often all ranks had been started again: 0, the default, is the first start, ``any`` is each
``do``     ``kill`` (SIGKILL, the default), ``abort`` (SIGABRT), ``raise`` (an exception), ``exit`` (as
           ``sys.exit(0)``), ``stop`` (SIGSTOP), or a number of seconds to sleep
=========  ===========================================================================================================

The variable is read once, at import. Without it, a failpoint only calls an empty function.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError

VARIABLE = "PACELINE_FAILPOINTS"
MOMENTS = (
    "rendezvous",  # before the process group is made
    "forward",  # of Paceline's wrapper, in training
    "bucket",  # between the launch of one bucket and that of the next
    "prepared",  # between reduction and optimizer step: before the gate
    "gate",  # the same, behind the gate
    "optimizer",  # inside the optimizer; a script says when
    "gather",  # when the ranks' shares are being gathered
    "evaluation",  # between two steps; a script says when
    "sample",  # when one is fetched, in a DataLoader's worker; a script says when
    "stepped",  # behind the optimizer, before the end of the step
    "boundary",  # behind the end of the step
    "write",  # in the middle of a checkpoint's files, on disk or in memory
    "before-rename",  # of a whole checkpoint to its name
    "after-rename",
    "rescue",  # before anything is written of it
    "restore",  # when some of the objects have their states
)


class Struck(Exception):
    """The exception of a failpoint."""


@dataclass(frozen=True)
class Order:
    """An order to strike."""

    moment: str
    rank: str = "any"
    at: str = "1"
    start: str = "0"
    do: str = "kill"

    @classmethod
    def of(cls, text: str) -> Order:
        """Return the order that `text` describes."""
        moment, *settings = text.split()
        try:
            order = cls(moment, **dict(setting.split("=") for setting in settings))
        except (TypeError, ValueError):
            raise UsageError(
                f"{VARIABLE}: {text!r} is not a valid order; write: moment rank=0 at=1 start=0 do=kill"
            ) from None
        if moment not in MOMENTS:
            raise UsageError(f"{VARIABLE}: {text!r} is not a valid order; the moments are {', '.join(MOMENTS)}")
        return order

    def is_due(self, moment: str, rank: str, at: int, start: str) -> bool:
        """Return whether it is due when `rank` comes to `moment` for the `at`-th time in this `start`."""
        is_time = (moment, at) == (self.moment, int(self.at)) and self.start in ("any", start)
        return is_time and self.rank in ("any", rank)


class Striker:
    """Carries out `orders` in this process."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders
        self._times: Counter[str] = Counter()
        """How often each moment has come."""

    def strike(self, moment: str) -> None:
        """Strike this rank if that is ordered for `moment`."""
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
    """Ignore the moment, because the variable has no orders."""


_orders = [Order.of(text) for text in os.environ.get(VARIABLE, "").split(";") if text.strip()]
strike = Striker(_orders).strike if _orders else pass_by
