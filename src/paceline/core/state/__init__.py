"""Values that ranks share: buckets, shards, digests, random streams, data positions."""
