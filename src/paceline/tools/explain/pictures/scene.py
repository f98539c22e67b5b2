"""The scene: a picture in frames, which are pieces of SVG. A sheet shows them side by side, a page plays them."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

MOST_RANKS = 16
"""Most ranks of a picture that can be read."""


@dataclass(frozen=True)
class Frame:
    """One picture of a scene."""

    title: str
    """Heading, such as ``"step 2 of 6: receivers add"``."""
    caption: str
    """The event in words."""
    drawing: str
    """SVG elements, within the scene's width and height."""
    moving: str = ""
    """SVG elements that travel before the drawing is shown, each with its distance in ``--dx``."""


@dataclass(frozen=True)
class Scene:
    """The drawing of one algorithm."""

    title: str
    summary: str
    """One sentence below the title, on the cost."""
    reading: str
    """Instructions for reading the picture."""
    width: float = 0.0
    height: float = 0.0
    frames: tuple[Frame, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    """SVG elements that drawings refer to by their id."""
    still: str | None = None
    """Drawing that a sheet shows instead of the frames, where one tells everything."""
    still_size: tuple[float, float] | None = None
    """Width and height of the still, where they are not those of the frames."""
    hint: str = ""
    """Hint for someone who sees the frames played for the first time."""
    about: str = ""
    """Opening of a page: what the algorithm is for, in words that need no other page."""
    legend: tuple[tuple[str, str], ...] = ()
    """Classes of bars, and what each means."""
    small: Scene | None = None
    """The same frames, drawn for a window of 400 pixels."""


def text(x: float, y: float, words: str, kind: str = "label", anchor: str = "start") -> str:
    """Draw a line of text whose baseline is at `y`."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def ms(seconds: float) -> str:
    """Return a time in milliseconds: ``31.8 ms``."""
    return f"{figure(seconds)} ms"


def figure(seconds: float) -> str:
    """Return a time in milliseconds without the unit, which the sentence or the table names: ``31.8``."""
    return f"{1000 * seconds:.1f}"


def shared(scenes: Sequence[Scene]) -> str:
    """Return the elements that the scenes' drawings refer to, each once."""
    return "".join({name: drawing for scene in scenes for name, drawing in scene.shared.items()}.values())


def colours(scenes: Sequence[Scene]) -> str:
    """Return styles that give each rank, bucket or line a colour: ``k0`` as ground of dark text, ``s0`` as stroke."""
    # Counted in the drawings, so that neither Scene nor its callers have to know how many colours a picture takes;
    # a small drawing has those of the large one.
    drawings = shared(scenes) + "".join(frame.drawing for one in scenes for frame in one.frames)
    drawings += "".join(one.still or "" for one in scenes)
    kinds = 1 + max((int(number) for number in re.findall(r'class="[ks](\d+)', drawings)), default=0)

    def rules(ground: float, stroke: float) -> list[str]:
        return [
            f".k{one} {{ fill: {_colour(one, kinds, ground)}; }} .s{one} {{ stroke: {_colour(one, kinds, stroke)}; }}"
            for one in range(kinds)
        ]

    return "\n".join([*rules(0.74, 0.42), "@media (prefers-color-scheme: dark) {", *rules(0.68, 0.68), "}"])


def _colour(one: int, kinds: int, lightness: float) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.58 + one / kinds) % 1, lightness, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


STYLE = """
svg { font: 12px system-ui, "DejaVu Sans", sans-serif; }
.ground { fill: #ffffff; }
.heading { fill: #1a1d21; font-weight: 600; }
.big { fill: #1a1d21; font-weight: 600; font-size: 16px; }
.label { fill: #4a5057; }
.digit { fill: #14171a; font-size: 10px; }
.number { fill: #4a5057; font-size: 10px; }
.cell { fill: #eceef0; stroke: #b9bec4; }
.came { fill: none; stroke: #1a1d21; stroke-width: 2; }
.way { fill: none; stroke: #1a1d21; stroke-width: 1.4; }
.tip { fill: #1a1d21; }
.idle { opacity: 0.45; }
.bubble { fill: #e3897c; stroke: #c0392b; }
.wait { fill: #b9bec4; }
.elsewhere { fill: none; stroke: #1a1d21; stroke-dasharray: 4 3; }
.ghost { fill: none; stroke: #b9bec4; stroke-dasharray: 3 3; }
.axis { stroke: #b9bec4; }
.now { stroke: #c0392b; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #16191d; }
  .heading, .big { fill: #eef0f2; }
  .label, .number { fill: #b4bac1; }
  .cell { fill: #2b3036; }
  .cell, .ghost, .axis { stroke: #596069; }
  .came, .way, .elsewhere { stroke: #eef0f2; }
  .tip { fill: #eef0f2; }
}
"""
