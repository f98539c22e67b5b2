"""The pictures: each is drawn from an example that is computed.

Rooms, each above those that it imports:

    bubble · devices · panels · slice_tree · workflow
    collectives · two_ways
    timeline
    gantt · ring_exchange
    cells
    scene
"""
