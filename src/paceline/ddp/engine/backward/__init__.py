"""One synchronized backward, stage by stage.

Rooms, each above those that it imports:

    resync
    finish · restore
    backward
    phase
    new_parameters
    concurrent_wrappers · pending_forwards · second_pass
"""
