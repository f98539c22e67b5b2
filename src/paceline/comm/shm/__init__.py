"""Shared memory between the ranks of one host: arena, handshake, doorbells, engine, collectives.

Rooms, each above those that it imports:

    collectives
    all_reduce
    stage
    engine
    doorbells · handshake · operation
    header · introduction
    arena · descriptors
"""
