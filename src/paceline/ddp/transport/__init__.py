"""Moves buckets between ranks: a wrapper's own channel, and the finishers of buckets."""
