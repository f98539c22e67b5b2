"""Output files of commands, checked before the work starts and written at its end: text, charts and HTML pages."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")


def check_file(option: str, file: str | None) -> None:
    """Raise an error early if `file` cannot be written."""
    if file is None:
        return
    path = Path(file).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {file}: the folder {path.parent} does not exist; make it, or choose another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "permission denied"
        raise UsageError(f"{option} {file} cannot be written: {reason}; choose another file")


def write_file(option: str, file: str | None, content: str | bytes) -> None:
    """Write `content` to `file`, unless `file` is None."""
    if file is None:
        return
    try:
        # A path in the text may not be UTF-8.
        Path(file).write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error.strerror}; choose another file") from error


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


def document(title: str, body: str, styles: str, scripts: Sequence[str]) -> str:
    """Return an HTML document with a light and a dark theme; the styles of the theme come before `styles`."""
    code = "\n".join(f"<script>\n{script}\n</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{resource("paceline.core", "theme.css")}
{styles}
</style>
</head>
<body>
{body}
{code}
</body>
</html>
"""


def data_block(name: str, value: Any) -> str:
    """Return an element with the id `name` that holds `value` as JSON."""
    # "</script>" in a string would end the element.
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def resource(package: str, *path: str) -> str:
    """Return the text of a file that belongs to `package`."""
    return files(package).joinpath(*path).read_text("utf-8")
