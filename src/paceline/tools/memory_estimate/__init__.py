"""Estimates the memory that a training takes on each rank, before anything is allocated: ``paceline estimate-memory``.

Rooms, each above those that it imports:

    estimate_command
    estimate
    batch · hub_models · python_models · strategies
    activations · built_model · contents · trial
"""
