"""A scene: a picture in frames, which a page plays and a sheet shows side by side, and the same content as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table


class Drawing(NamedTuple):
    """SVG elements and the size of the drawing."""

    svg: str
    width: float
    height: float


@dataclass(frozen=True)
class Frame:
    """One picture of a scene."""

    title: str
    caption: str
    drawing: Drawing
    moving: str = ""
    """SVG elements that an animation moves by their ``--dx`` and ``--dy`` before the drawing is shown."""


@dataclass(frozen=True)
class Scene:
    """A subject of ``paceline explain``, or one case of a subject."""

    title: str
    about: str
    """The purpose of the subject, shown at the top of a page."""
    summary: str
    """The result in a sentence or two."""
    reading: str
    """How to read the picture."""
    hint: str
    """The part to watch while the frames play."""
    frames: Sequence[Frame]
    shown: Sequence[Frame] = ()
    """Frames shown on a sheet; by default all."""
    table: Table | None = None
    symbols: Mapping[str, str] = field(default_factory=dict)
    """SVG elements that drawings refer to by their id."""
    legend: Sequence[tuple[str, str]] = ()
    """CSS classes of bars, and their meanings."""


def text(x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> str:
    """Draw a line of text whose baseline is at `y`."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def definitions(scenes: Iterable[Scene]) -> str:
    """Return the elements that the drawings refer to, each once."""
    symbols = {name: drawing for scene in scenes for name, drawing in scene.symbols.items()}
    return f"<defs>{''.join(symbols.values())}</defs>"


def ms(seconds: float) -> str:
    """Return a time in milliseconds: ``31.8 ms``."""
    return f"{figure(seconds)} ms"


def figure(seconds: float) -> str:
    """Return a time in milliseconds without the unit: ``31.8``."""
    return f"{1000 * seconds:.1f}"
