"""Communication: the bytes that move between ranks.

Rooms, each above those that it imports:

    c10d
    algorithms · open_native
    topology
    gloo · own_group · shm
    arithmetic · forking · registered_memory
"""
