"""Progress on the terminal and metrics in files, on rank 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.errors import MissingExtra, UsageError


class MetricsLog:
    """Writes metrics as JSON Lines and, if asked for, for TensorBoard; on rank 0 only.

    Args:
        file: JSON Lines file, or None. Lines are added to those of earlier runs; a resumed run drops those of its own
            that are after `step`, which it repeats.
        tensorboard_dir: folder for TensorBoard, or None.
        step: the step that the run begins at.
        evaluates_first: whether the run begins with the evaluation that was due at `step`, whose line, if an earlier
            run came to write one, is dropped as well.

    Raises:
        UsageError: if the file cannot be written.
        MissingExtra: if TensorBoard is asked for and not installed.
    """

    def __init__(self, file: str | None, tensorboard_dir: str | None, step: int, evaluates_first: bool = False) -> None:
        self._file: TextIO | None = None
        self._board: Any = None
        if tensorboard_dir is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise MissingExtra("tensorboard", "tensorboard", "writing TensorBoard files") from None
            self._board = SummaryWriter(tensorboard_dir, purge_step=step + 1 if step else None)
        if file is not None:
            self._file = _reopen(Path(file), step, evaluates_first)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` as of `step`."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _reopen(path: Path, step: int, evaluates_first: bool) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = lines[: _lines_until(lines, step, evaluates_first)] if step else lines
        file = path.open("a")
        file.truncate(sum(map(len, kept)))  # never rewritten, so that a kill just now loses nothing
        if kept and not kept[-1].endswith(b"\n"):
            file.write("\n")  # another run was killed in the midst of its last line
        return file
    except OSError as error:
        raise UsageError(f"metrics cannot be written to {path}: {error.strerror}; choose another file") from error


def _lines_until(lines: Sequence[bytes], step: int, evaluates_first: bool) -> int:
    """Return how many of `lines` stay when a run is resumed at `step`: those of earlier runs, and its own up to `step`.

    If the evaluation at `step` follows, only the first line of `step`, that of the training, stays.
    """
    steps = [_step_of(line) for line in lines]
    begin, before = 0, 0.0
    for index, number in enumerate(steps):
        if number is not None:
            begin = index if number < before else begin  # another run began here
            before = number
    end = next((index for index in range(begin, len(steps)) if (steps[index] or 0) > step), len(steps))
    if evaluates_first and step in steps[begin:end]:
        end = steps.index(step, begin) + 1
    while end > begin and steps[end - 1] is None:
        end -= 1
    return end


def _step_of(line: bytes) -> float | None:
    """Return the step of a line; None for a line that is incomplete because its run was killed."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


class ProgressDisplay:
    """A bar over all steps on a terminal; elsewhere a line per epoch. Shows nothing unless `on`."""

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

    def epoch_ended(self, epoch: int, epochs: int, values: Mapping[str, float]) -> None:
        """Show the results of the epoch."""
        if not self._on:
            return
        line = f"epoch {epoch + 1}/{epochs}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
