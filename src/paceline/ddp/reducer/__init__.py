"""Averages gradients during the backward pass, using buckets and autograd hooks."""
