"""Pictures of how ranks communicate: ``paceline explain``.

A subject computes which rank holds which data, or when each rank works, and draws a grid (ranks and their data) or a
chart (ranks over time). The resulting scenes become an animated page, a sheet (SVG) or tables.

``explain_command.py`` lists the subjects, and the schedules of :mod:`paceline.comm.schedules` that it can draw.

a subject (collectives.py, buckets.py, …) ──▶ drawing.py ──▶ scene.py
"""
