"""Computes figures, the verdict and advice from the ranks' records."""
