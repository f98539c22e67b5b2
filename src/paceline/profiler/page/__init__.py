"""The page of a profile: ``report.html``, one self-contained file.

    Report ──▶ sections of HTML (verdict, advice, bars, who waits, tables) ─┐
           ──▶ JSON for the drawings in the browser (timeline, charts) ─────┴▶ one document

uPlot, in ``uplot/``, draws the charts; decision 0027 gives the reasons.
"""
