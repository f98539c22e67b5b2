"""Pieces of HTML for sections. All words that come from a run pass through ``escape``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Section:
    """A part of the page, with a link in the navigation if it has a title."""

    name: str
    title: str
    link: str
    """Word of the link in the navigation."""
    body: str
    """Contents in HTML."""

    def html(self) -> str:
        """Return the section as an element."""
        heading = f"<h2>{escape(self.title)}</h2>\n" if self.title else ""
        label = escape(self.title or "Verdict")
        return f'<section id="{self.name}" aria-label="{label}">{heading}{self.body}</section>\n'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], label: str, *, words: int = 1) -> str:
    """Return a table of HTML cells; all columns but the first `words` are figures, aligned to the right."""
    kinds = ['class="word"' if index < words else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col" {kind}>{name}</th>' for name, kind in zip(heads, kinds, strict=True))
    lines = "".join(
        "<tr>"
        + f'<th scope="row" class="word">{row[0]}</th>'
        + "".join(f"<td {kind}>{cell}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    # A narrow window scrolls the table; with a tabindex, keys can do that, too.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def folded(summary: str, body: str) -> str:
    """Return a part that is hidden until it is clicked."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def meter(share: float, kind: str = "") -> str:
    """Draw a share as the filled part of a line; the figure stands beside it, so it is hidden from screen readers."""
    width = 100 * min(1.0, max(0.0, share))
    return f'<span class="meter {kind}" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'


def metered(figure: str, share: float, kind: str = "") -> str:
    """Draw a share beside its figure, in a cell of a table."""
    return f'<span class="metered">{meter(share, kind)}<span>{figure}</span></span>'


def select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    """Return a choice among `options`, which are pairs of value and text."""
    inside = "".join(f'<option value="{escape(value)}">{escape(shown)}</option>' for value, shown in options)
    return f'<label>{escape(label)} <select name="{name}">{inside}</select></label>'
