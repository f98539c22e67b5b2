"""A sheet: all frames of the scenes in one SVG file, which follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from paceline.core.output.html import resource
from paceline.tools.explain.scene import Scene, definitions, text

MARGIN, LINE, WIDEST = 20.0, 18.0, 1090.0
"""Space at the edges, height of a line of text, and width beyond which frames go into the next row."""
LETTER = 6.6
"""Estimated width of a letter, because the reader's font is not known here."""


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
