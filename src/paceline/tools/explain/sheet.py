"""A sheet: all frames of the scenes in one SVG file, which follows the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from paceline.tools.explain.pictures.scene import STYLE, Frame, Scene, colours, shared, text

MARGIN = 20.0
HEAD = 34.0
"""Height of a scene's title, with the space below its summary and reading."""
LINE = 18.0
"""Height of a line of the summary and the reading."""
CAPTION = 40.0
"""Height of a frame's title and caption."""
BESIDE = 44.0
"""Space between two frames."""
WIDEST = 980.0
"""Width beyond which frames go into the next row, unless one alone is wider."""
LETTER = 6.6
"""Estimated width of a letter of a caption: the font is the reader's, and is not known here."""


def sheet(scenes: Sequence[Scene]) -> str:
    """Return the SVG document."""
    parts, top, wide = [], MARGIN, 0.0
    for scene in scenes:
        drawn, right, below = _scene(scene, top)
        parts.append(drawn)
        top, wide = below + MARGIN, max(wide, right)
    width, height = wide + MARGIN, top
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}">\n<title>{"; ".join(scene.title for scene in scenes)}</title>\n'
        f"<style>{STYLE}{colours(scenes)}</style>\n<defs>{shared(scenes)}</defs>\n"
        f'<rect width="{width:g}" height="{height:g}" class="ground"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _scene(scene: Scene, top: float) -> tuple[str, float, float]:
    """Return the scene's part of the sheet, its right edge and its lower one."""
    lines = [line for words in (scene.summary, scene.reading) for line in wrap(words, int(WIDEST / LETTER))]
    parts = [text(MARGIN, top + 16, scene.title, "big")]
    parts += [text(MARGIN, top + 36 + LINE * number, line) for number, line in enumerate(lines)]
    top += HEAD + LINE * len(lines)
    frames = scene.frames if scene.still is None else [Frame("", "", scene.still)]
    width, height = scene.still_size or (scene.width, scene.height)
    column = max([width, *(LETTER * len(line) for frame in frames for line in (frame.title, frame.caption))])
    across = max(1, int((WIDEST + BESIDE) // (column + BESIDE)))
    caption = CAPTION if scene.still is None else 0.0
    row = caption + height + 14
    for number, frame in enumerate(frames):
        x = MARGIN + number % across * (column + BESIDE)
        y = top + number // across * row
        words = text(0, 14, frame.title, "heading") + text(0, 31, frame.caption) if caption else ""
        parts.append(f'<g transform="translate({x:g},{y:g})">{words}')
        parts.append(f'<g transform="translate(0,{caption:g})">{frame.drawing}</g></g>')
    columns, rows = min(across, len(frames)), -(-len(frames) // across)
    text_width = max(10 * len(scene.title), *(LETTER * len(line) for line in lines))
    right = MARGIN + max(columns * (column + BESIDE) - BESIDE, text_width)
    return "\n".join(parts), right, top + rows * row
