"""Keeps replicas equal: at the start, in their buffers, and checked from time to time."""
