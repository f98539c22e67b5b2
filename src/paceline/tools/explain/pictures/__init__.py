"""The pictures: each from an example that is computed, not drawn.

Rooms, each above those that it imports:

    bubble · devices · workflow
    rank_steps · two_ways
    gantt · ring_exchange · timeline
    axis · cells · sheet
    scene
"""
