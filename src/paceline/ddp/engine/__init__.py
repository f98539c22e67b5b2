"""Averages gradients during backward: buckets, hooks, and what does not fit into a bucket.

Rooms, each above those that it imports:

    lazy_engine · single_rank
    backward · device · interface · parts · reducer · steady_step
    gradients
    parameters
"""
