"""Averages gradients during backward: buckets, hooks, and what does not fit into a bucket."""
