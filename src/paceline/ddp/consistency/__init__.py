"""Keeps replicas equal: initial values, buffers, and changes to the module."""
