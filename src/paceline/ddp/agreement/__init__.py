"""Compares the ranks' status in every synchronized backward, alongside the gradients, and acts on it."""
