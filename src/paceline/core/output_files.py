"""Charts, drawn with Matplotlib and saved to a file."""

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
    """Raise an error early if a chart cannot be written to `file`."""
    if file is None:
        return
    if Path(file).suffix not in SUFFIXES:
        raise UsageError(f"{option} {file}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "notebook", option)
    check_file(option, file)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_chart(option: str, file: str, figure: Figure) -> None:
    """Write `figure` to `file`, in the format given by its suffix."""
    import matplotlib

    drawn, suffix = io.BytesIO(), Path(file).suffix[1:]
    # Omit the date and random IDs, so that the same chart always produces the same file. Keep text searchable.
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    write_file(option, file, drawn.getvalue())
