"""Compares the ranks' status in every synchronized backward, besides gradients, and acts on it."""
