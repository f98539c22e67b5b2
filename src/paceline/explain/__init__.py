"""Pictures of how ranks talk, drawn by running the schedules that are executed: ``paceline explain``.

Schedule ──run──▶ Scene (its frames: who holds what after each step) ──▶ SVG, HTML page, or table
buckets and seconds ──▶ Scene (the timeline of a backward)           ──▶ SVG, HTML page, or table
"""
