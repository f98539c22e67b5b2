"""Values that ranks share: buckets, shards, digests, random streams, data positions.

Rooms, each above those that it imports:

    data_position · digests · virtual_ranks
    buckets · device_streams · optimizer_shards · rng · saved_buffers · unwrapping · waited
"""
