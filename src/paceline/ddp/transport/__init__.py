"""Moves buckets between ranks: a wrapper's own channel, and the finishers of buckets.

Rooms, each above those that it imports:

    comm_hook · opening · sparse
    device_channel · finisher · shared_channel
    channel · exposed_time · grad_bucket · hook_signature
"""
