"""Moves buckets between ranks, using a channel per wrapper and a finisher that averages buckets."""
