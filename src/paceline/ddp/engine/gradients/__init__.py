"""Gradients in buckets and in ``p.grad``."""
