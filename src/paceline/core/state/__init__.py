"""State shared by ranks: shards, digests, random streams, data positions."""
