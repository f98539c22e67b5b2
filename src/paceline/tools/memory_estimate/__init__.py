"""Estimates the peak of each rank's memory in training, before anything is allocated: ``paceline estimate-memory``.

Rooms, each above those that it imports:

    estimate_command
    estimate
    batch · hub_models · python_models · strategies
    built_model · dry_run
    kernels
    contents · trial
    live_bytes
"""
