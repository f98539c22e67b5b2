"""Averages gradients during backward: buckets, hooks, and the step from an output to the averages.

Rooms, each above those that it imports:

    reducer
    step
    abort · exchange
    arrivals · averages · extension
    bucket_set · forwards · gradients
    backward · gradient_views
"""
