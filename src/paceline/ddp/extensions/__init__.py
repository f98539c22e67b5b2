"""The rare cases of a step, which the reducer calls at named moments (:mod:`paceline.ddp.reducer.extension`).

Rooms, each above those that it imports:

    new_parameters · shared_parameters
    finite_check · graph_capture · joined_steps · optimizer_in_backward
    out_of_bucket · replica_check · sharing · unused_parameters
"""
