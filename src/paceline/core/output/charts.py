"""Charts of numbers, drawn by Matplotlib into the file that a command was asked for."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.output.files import check_file, write_file
from paceline.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")


def check_chart(option: str, file: str | None) -> None:
    """Raise now if a chart cannot be drawn into `file` after the work."""
    if file is None:
        return
    if Path(file).suffix not in SUFFIXES:
        raise UsageError(f"{option} {file}: the name has to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "notebook", option)
    check_file(option, file)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_chart(option: str, file: str, figure: Figure) -> None:
    """Write `figure` to `file`, in the format of its suffix."""
    import matplotlib

    drawn, suffix = io.BytesIO(), Path(file).suffix[1:]
    # Without a date and random ids the same chart gives the same file; text stays text, and can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    write_file(option, file, drawn.getvalue())
