"""Moves buckets between ranks: a wrapper's own channel, and what reduces a bucket."""
