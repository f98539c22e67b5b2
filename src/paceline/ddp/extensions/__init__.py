"""The rare cases of a step, which the reducer calls at named moments.

Rooms, each above those that it imports:

    mean_losses · new_parameters
    finite_check · graph_capture · joined_steps · optimizer_in_backward · out_of_bucket · replica_check · scattered_gradients · shared_parameters · unused_parameters
"""
