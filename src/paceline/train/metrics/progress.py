"""The progress display of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressDisplay:
    """A progress bar on a terminal, otherwise a line per epoch; disabled unless `on`."""

    def __init__(self, total_steps: int | None, step: int, *, on: bool) -> None:
        console = Console(file=sys.stdout)
        self._on, self._bar = on, None
        if on and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("training", total=total_steps, completed=step)

    def advance(self, epoch: int) -> None:
        """Advance by one step."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"epoch {epoch + 1}")

    def epoch_ended(self, epoch: int, epochs: int | None, values: Mapping[str, float]) -> None:
        """Show the results of an epoch."""
        self._show(f"epoch {epoch + 1}" if epochs is None else f"epoch {epoch + 1}/{epochs}", values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Show the results of an evaluation after `step`."""
        self._show(f"step {step}", values)

    def _show(self, label: str, values: Mapping[str, float]) -> None:
        if not self._on:
            return
        line = f"{label}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
