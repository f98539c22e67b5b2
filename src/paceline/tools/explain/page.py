"""A page: the scenes in one HTML file that plays them, one frame after the other. It needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.core.output.html import document, resource
from paceline.tools.explain.pictures.scene import STYLE, Frame, Scene, colours, shared

BUTTONS = (("Start", "Home"), ("Back", "←"), ("Play", "Space"), ("Next", "→"))
SCALE = 1.6
"""Size of the pictures relative to a sheet, where several stand side by side."""
SMALLEST = 0.75
"""Least size of a picture: letters of 9 pixels."""
KEYS = (
    "The picture opens at the end; Play shows how it comes about. "
    "Keys: Space plays and pauses, → and ← step, Home and End go to the start and the end."
)


def page(scenes: Sequence[Scene]) -> str:
    """Return the HTML document."""
    unseen = 'width="0" height="0" style="position: absolute" aria-hidden="true"'
    drawn = [*scenes, *(scene.small for scene in scenes if scene.small)]
    # The shared elements are in a picture of their own, because every scene refers to them.
    body = f"""<svg {unseen}><defs>{shared(drawn)}</defs></svg>
{"".join(map(_section, scenes))}
<p class="keys">{KEYS}</p>"""
    styles = resource("paceline.tools.explain", "player.css") + STYLE + colours(scenes)
    title = "; ".join(scene.title for scene in scenes)
    return document(title, body, styles, [resource("paceline.tools.explain", "player.js")])


def _section(scene: Scene) -> str:
    last = len(scene.frames) - 1
    small = scene.small or scene
    buttons = "".join(f'<button type="button" title="{key}">{name}</button>' for name, key in BUTTONS)
    return f"""<section>
<h1>{escape(scene.title)}</h1>
{_paragraph("about", scene.about)}
<p>{escape(scene.summary)}</p>
<p class="reading large">{escape(scene.reading)}</p>
<p class="reading small">{escape(small.reading)}</p>
{_paragraph("watch", scene.hint, "<strong>Watch</strong> ")}
<div class="stage" tabindex="0" role="img" aria-label="{escape(scene.title)}, step by step">
{_picture(scene, "large")}
{_picture(small, "small")}
</div>
{_legend(scene)}
<div class="controls">{buttons}
<input type="range" min="0" max="{last}" value="{last}" step="1" aria-label="step"></div>
<div class="said" aria-live="polite"><strong></strong><span></span></div>
</section>
"""


def _paragraph(kind: str, words: str, before: str = "") -> str:
    return f'<p class="{kind}">{before}{escape(words)}</p>' if words else ""


def _picture(scene: Scene, kind: str) -> str:
    size = f'viewBox="0 0 {scene.width:g} {scene.height:g}" width="{SCALE * scene.width:g}"'
    # A window that is narrower still scrolls, because words that shrink with it cannot be read.
    size += f' style="min-width: {SMALLEST * scene.width:g}px"'
    frames = "".join(_frame(frame, frame is scene.frames[-1]) for frame in scene.frames)
    return f'<svg class="{kind}" {size} xmlns="http://www.w3.org/2000/svg">\n{frames}</svg>'


def _frame(frame: Frame, is_shown: bool) -> str:
    words = f'data-title="{escape(frame.title)}" data-caption="{escape(frame.caption)}"'
    kind = "frame shown" if is_shown else "frame"
    return f'<g class="{kind}" {words}>{frame.drawing}</g>\n<g class="moving">{frame.moving}</g>\n'


def _legend(scene: Scene) -> str:
    """Return a swatch and a meaning for each kind of bar."""
    box = '<svg width="20" height="12" aria-hidden="true"><rect x="1" y="1" width="18" height="10" rx="2" class="{}"/>'
    entries = "".join(f"<li>{box.format(kind)}</svg> {escape(words)}</li>" for kind, words in scene.legend)
    return f'<ul class="legend">{entries}</ul>' if entries else ""
