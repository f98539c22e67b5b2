"""The messages between the kernel and its ranks, which are pickled tuples.

    kernel                                              rank
    ("run", text, number)                ──▶            runs a cell
    ("barrier",)  ("leave",)  ("join",)  ("pull", …)    the functions of paceline.tools.notebook.rank
                                         ◀──            ("display", data, …)  ("clear", wait)   while a cell runs
                                         ◀──            ("done", result, failure)

A rank's first message is ("ready",). While a cell runs, the rank reads no messages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """An error that a cell raised on a rank."""

    name: str
    """Name of its class."""
    message: str
    trace: tuple[str, ...]
    """Traceback in IPython's format."""
    breaks_group: bool = False
    """Whether the process group is unusable afterwards."""

    @property
    def is_interrupt(self) -> bool:
        """Whether the rank was interrupted."""
        return self.name == "KeyboardInterrupt"
