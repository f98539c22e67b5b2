"""A page: the scenes in one HTML file that plays them, one frame after the other. It needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.core.output.html import document, resource
from paceline.tools.explain.pictures.scene import STYLE, Frame, Scene, colours, shared

BUTTONS = (("Start", "Home"), ("Back", "←"), ("Play", "Space"), ("Next", "→"))
SCALE = 1.6
"""Size of the pictures relative to a sheet, where several stand side by side."""


def page(scenes: Sequence[Scene]) -> str:
    """Return the HTML document."""
    unseen = 'width="0" height="0" style="position: absolute" aria-hidden="true"'
    # The shared elements are in a picture of their own, because every scene refers to them.
    body = f"""<svg {unseen}><defs>{shared(scenes)}</defs></svg>
{"".join(map(_section, scenes))}
<p class="keys">Keys: Space plays and pauses, → and ← step, Home and End go to the start and the end.</p>"""
    styles = resource("paceline.tools.explain", "player.css") + STYLE + colours(scenes)
    title = "; ".join(scene.title for scene in scenes)
    return document(title, body, styles, [resource("paceline.tools.explain", "player.js")])


def _section(scene: Scene) -> str:
    last = len(scene.frames) - 1
    size = f'viewBox="0 0 {scene.width:g} {scene.height:g}" width="{SCALE * scene.width:g}"'
    # A narrow window scrolls, because words that shrink with it cannot be read.
    size += f' style="min-width: {scene.width:g}px"'
    buttons = "".join(f'<button type="button" title="{key}">{name}</button>' for name, key in BUTTONS)
    return f"""<section>
<h1>{escape(scene.title)}</h1>
<p>{escape(scene.summary)}</p>
<p class="reading">{escape(scene.reading)}</p>
{_watch(scene)}
<div class="stage" tabindex="0" role="img" aria-label="{escape(scene.title)}, step by step">
<svg {size} xmlns="http://www.w3.org/2000/svg">
{"".join(map(_frame, scene.frames))}
</svg>
</div>
<div class="controls">{buttons}
<input type="range" min="0" max="{last}" value="0" step="1" aria-label="step"></div>
<div class="said" aria-live="polite"><strong></strong><span></span></div>
</section>
"""


def _watch(scene: Scene) -> str:
    return f'<p class="watch"><strong>Watch</strong> {escape(scene.hint)}</p>' if scene.hint else ""


def _frame(frame: Frame) -> str:
    words = f'data-title="{escape(frame.title)}" data-caption="{escape(frame.caption)}"'
    return f'<g class="frame" {words}>{frame.drawing}</g>\n<g class="moving">{frame.moving}</g>\n'
