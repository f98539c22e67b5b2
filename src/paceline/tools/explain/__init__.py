"""Pictures of how ranks talk, drawn by running the schedules that are executed: ``paceline explain``.

Schedule ──run──▶ Scene (its frames: who holds what after each step) ──▶ SVG, HTML page, or table
buckets and seconds ──▶ Scene (the timeline of a backward)           ──▶ SVG, HTML page, or table
work of ranks ──▶ meetings ──▶ Scene (the timeline of a step, with its bubbles) ──▶ the same
stages of a step ──▶ Scene (what each device holds and sends)        ──▶ the same
"""
