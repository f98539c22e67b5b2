"""An animated page that plays the scenes frame by frame: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.core.output.html import document, resource
from paceline.tools.explain.scene import Frame, Scene, definitions

BUTTONS = (("Start", "Home"), ("Back", "←"), ("Play", "Space"), ("Next", "→"))
LARGEST, SMALLEST = 1.6, 0.75
"""Range of sizes, relative to a sheet. An even narrower window scrolls, so that text stays legible."""
KEYS = "Play builds the picture step by step. Space plays and pauses, → and ← step, Home and End go to either end."


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
