"""The page of a profile: ``report.html``, in one file that fetches nothing, the verdict first.

    Report ──▶ sections of HTML (verdict, advice, bars, who waits, tables) ─┐
           ──▶ JSON for the drawings in the browser (timeline, charts) ─────┴▶ one document

uPlot, in ``uplot/``, draws the charts; decision 27 says why.
"""

from __future__ import annotations

from paceline.profiler.page.layout import comparison_page, page

__all__ = ["comparison_page", "page"]
