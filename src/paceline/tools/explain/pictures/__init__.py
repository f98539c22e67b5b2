"""The pictures: each is drawn from an example that is computed.

Rooms, each above those that it imports:

    bubble · devices · panels · workflow
    collectives · rank_steps · two_ways
    timeline
    gantt · ring_exchange
    cells
    scene
"""
