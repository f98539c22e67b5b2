"""Pictures of how ranks talk: ``paceline explain``.

A subject computes who holds what, or who works when, and draws it with a grid (ranks and their data) or a chart (ranks
over time). The result is a list of scenes, which become a page that plays them, a sheet (SVG) or tables.

subjects/ ──▶ grid.py, chart.py ──▶ scene.py ──▶ page.py, sheet.py
"""
