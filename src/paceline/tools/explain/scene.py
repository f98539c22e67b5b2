"""A scene: a picture in frames, which a page plays and a sheet shows side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.output_files import document, resource

if TYPE_CHECKING:
    from rich.table import Table

BUTTONS = (("Start", "Home"), ("Back", "←"), ("Play", "Space"), ("Next", "→"))
LARGEST, SMALLEST = 1.6, 0.75
"""Range of sizes, relative to a sheet. An even narrower window scrolls, so that text stays legible."""
KEYS = "Play builds the picture step by step. Space plays and pauses, → and ← step, Home and End go to either end."
MARGIN, LINE, WIDEST = 20.0, 18.0, 1090.0
"""Space at the edges, height of a line of text, and width beyond which frames go into the next row."""
LETTER = 6.6
"""Estimated width of a letter, because the reader's font is not known here."""


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


def page(scenes: Sequence[Scene]) -> str:
    """Return the HTML document."""
    # Every scene refers to the shared elements, so they are in a separate SVG element.
    unseen = 'width="0" height="0" style="position: absolute" aria-hidden="true"'
    body = f"""<svg {unseen}>{definitions(scenes)}</svg>
{"".join(map(_section, scenes))}
<p class="keys">{KEYS}</p>"""
    title = "; ".join(scene.title for scene in scenes)
    names = ("player.css", "picture.css", "player.js")
    player, picture, script = (resource("paceline.tools.explain", name) for name in names)
    return document(title, body, player + picture, [script])


def _section(scene: Scene) -> str:
    last = len(scene.frames) - 1
    buttons = "".join(f'<button type="button" title="{key}">{name}</button>' for name, key in BUTTONS)
    return f"""<section>
<h1>{escape(scene.title)}</h1>
{_paragraph("about", scene.about)}
<p>{escape(scene.summary)}</p>
{_paragraph("reading", scene.reading)}
{_paragraph("watch", scene.hint, "<strong>Watch</strong> ")}
<div class="stage" tabindex="0" role="img" aria-label="{escape(scene.title)}, step by step">
{_picture(scene)}
</div>
{_legend(scene)}
<div class="controls">{buttons}
<input type="range" min="0" max="{last}" value="{last}" step="1" aria-label="step"></div>
<div class="said" aria-live="polite"><strong></strong><span></span></div>
</section>
"""


def _paragraph(kind: str, words: str, prefix: str = "") -> str:
    return f'<p class="{kind}">{prefix}{escape(words)}</p>' if words else ""


def _picture(scene: Scene) -> str:
    width, height = scene.frames[0].drawing[1:]
    size = f'viewBox="0 0 {width:g} {height:g}" width="{LARGEST * width:g}" style="min-width: {SMALLEST * width:g}px"'
    frames = "".join(_frame(frame, frame is scene.frames[-1]) for frame in scene.frames)
    return f'<svg {size} xmlns="http://www.w3.org/2000/svg">\n{frames}</svg>'


def _frame(frame: Frame, is_shown: bool) -> str:
    words = f'data-title="{escape(frame.title)}" data-caption="{escape(frame.caption)}"'
    kind = "frame shown" if is_shown else "frame"
    return f'<g class="{kind}" {words}>{frame.drawing.svg}</g>\n<g class="moving">{frame.moving}</g>\n'


def _legend(scene: Scene) -> str:
    swatch = (
        '<svg width="20" height="12" aria-hidden="true"><rect x="1" y="1" width="18" height="10" rx="2" class="{}"/>'
    )
    entries = "".join(f"<li>{swatch.format(kind)}</svg> {escape(words)}</li>" for kind, words in scene.legend)
    return f'<ul class="legend">{entries}</ul>' if entries else ""


def sheet(scenes: Sequence[Scene]) -> str:
    """Return the SVG document."""
    parts, bottom, right = [], MARGIN, 0.0
    for scene in scenes:
        drawn, width, height = _scene(scene)
        parts.append(f'<g transform="translate({MARGIN:g},{bottom:g})">{drawn}</g>')
        bottom, right = bottom + height + MARGIN, max(right, width)
    width = right + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom:g}" width="{width:g}" '
        f'height="{bottom:g}">\n<title>{"; ".join(scene.title for scene in scenes)}</title>\n'
        f"<style>{resource('paceline.tools.explain', 'picture.css')}</style>\n{definitions(scenes)}\n"
        f'<rect width="{width:g}" height="{bottom:g}" class="ground"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _scene(scene: Scene) -> tuple[str, float, float]:
    """Return the scene's part of the sheet, its width and its height."""
    lines = [line for words in (scene.summary, scene.reading) for line in wrap(words, int(WIDEST / LETTER))]
    parts = [text(0, 16, scene.title, "big")]
    parts += [text(0, 36 + LINE * number, line) for number, line in enumerate(lines)]
    frames = scene.shown or scene.frames
    caption = 40.0 if frames[0].title else 0.0
    words = [line for frame in frames for line in (frame.title, frame.caption)]
    column = max([frame.drawing.width for frame in frames] + [LETTER * len(line) for line in words]) + 30
    row = caption + max(frame.drawing.height for frame in frames) + 14
    across = min(len(frames), max(1, int((WIDEST + 30) // column)))
    top = 34 + LINE * len(lines)
    for number, frame in enumerate(frames):
        x, y = number % across * column, top + number // across * row
        heading = text(0, 14, frame.title, "heading") + text(0, 31, frame.caption) if caption else ""
        drawing = f'<g transform="translate(0,{caption:g})">{frame.drawing.svg}</g>'
        parts.append(f'<g transform="translate({x:g},{y:g})">{heading}{drawing}</g>')
    width = max(across * column - 30, *(LETTER * len(line) for line in lines))
    return "\n".join(parts), width, top + -(-len(frames) // across) * row
