"""Keeps replicas equal: their initial values, their buffers, and changes of the module."""
