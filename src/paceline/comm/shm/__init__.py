"""Shared memory between the ranks of one host: arena, handshake, doorbells, engine, collectives.

Rooms, each above those that it imports:

    collectives
    stage
    engine · places
    doorbells · handshake · operation
    header · introduction
    arena · registry
"""
