"""Shows in the notebook what ranks print and display: line by line with the rank, equal output once."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from IPython.display import clear_output, display

from paceline.core.processes.missing_ranks import named_ranks
from paceline.tools.notebook.kernel.output_folding import Folding

LIVE_S = 0.5
"""Between two looks at a line that is not complete, such as a progress bar."""

_CURSOR = re.compile(rb"\x1b\[(?:\?25[hl]|\d*[A-GJK])")
"""Escapes of progress bars that move or hide the cursor, or clear the line."""


class Screen:
    """The output of one cell.

    Args:
        ranks: that run it, in their order. Figures are shown of the first one.
        size: of the world.
    """

    def __init__(self, ranks: Sequence[int], size: int) -> None:
        self._ranks, self._size = list(ranks), size
        self._folding = Folding(self._ranks)
        self._partial = dict.fromkeys(ranks, b"")
        """Incomplete last line of each rank."""
        self._live = 0
        """Length of the text that the next line overwrites."""
        self._live_text, self._looked = b"", time.monotonic()
        """The first rank's incomplete line at the last look, and when that was."""
        self._shown = 0
        """Displays of the first rank."""
        self._others: list[tuple[int, tuple[Any, ...]]] = []
        """Displays of the others, with the rank."""

    def take(self, rank: int, printed: bytes) -> None:
        """Take the output of `rank`."""
        *lines, rest = (self._partial[rank] + printed).split(b"\n")
        now = time.monotonic()
        for line in lines:
            text = _final(line)
            if text or not line:  # else it only moved the cursor
                self._folding.add(rank, text, now)
        self._partial[rank] = rest

    def end(self, rank: int) -> None:
        """Expect nothing more from `rank`."""
        if self._partial[rank]:
            self.take(rank, b"\n")
        self._folding.end(rank)

    def show(self) -> None:
        """Print the lines that are ready, and where the first rank's progress bar stands."""
        now = time.monotonic()
        lines = [f"{self.name(group)} | {text}" for text, group in self._folding.ready(now)]
        if lines:
            self._write("\n".join(line.ljust(self._live if not at else 0) for at, line in enumerate(lines)), "\n")
            self._live = 0
        if now - self._looked >= LIVE_S:
            text, self._looked = self._partial[self._ranks[0]], now
            if text and text != self._live_text:
                line = f"{self.name(self._ranks[:1])} | {_final(text)}"
                self._write(line.ljust(self._live), "")
                self._live = len(line)
            self._live_text = text

    def _write(self, text: str, end: str) -> None:
        sys.stdout.write(("\r" if self._live else "") + text + end)
        sys.stdout.flush()

    def name(self, group: Sequence[int]) -> str:
        """Return "rank 0", "ranks 0, 2" or "all ranks"."""
        return "all ranks" if len(group) == self._size > 1 else named_ranks(sorted(group))

    def note(self, text: str) -> None:
        """Print a line of the kernel's own."""
        self._write(text.ljust(self._live), "\n")
        self._live = 0

    def display(self, rank: int, content: tuple[Any, ...]) -> None:
        """Show a figure or another display of the first rank; keep those of the others."""
        if rank != self._ranks[0]:
            self._others.append((rank, content))
            return
        self.show()
        self._shown += 1
        _display(content)

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the output, if the first rank says so."""
        if rank == self._ranks[0]:
            clear_output(wait)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Show the rest when all ranks have ended."""
        for rank in self._ranks:
            self.end(rank)
        self.show()
        if self._live:
            self._write("", "\n")
            self._live = 0
        if not self._shown:  # the cell displays on other ranks only
            for rank, content in self._others:
                self.note(f"{self.name([rank])} |")
                _display(content)


def _final(line: bytes) -> str:
    """Return the visible text of a line in which carriage returns go back to its beginning."""
    parts = [part for part in _CURSOR.sub(b"", line).split(b"\r") if part]
    return parts[-1].decode(errors="replace") if parts else ""


def _display(content: tuple[Any, ...]) -> None:
    data, metadata, transient, update = content
    options = {"display_id": transient["display_id"]} if "display_id" in transient else {}
    changes = {"update": True} if update else {}
    display(data, metadata=metadata, raw=True, **changes, **options)  # type: ignore[no-untyped-call]
