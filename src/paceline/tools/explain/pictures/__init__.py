"""The pictures: each from an example that is computed, not drawn.

Rooms, each above those that it imports:

    bubble · devices · workflow
    rank_steps · two_ways
    ring_exchange · timeline
    gantt
    axis · cells · sheet
    scene
"""
