"""Tells the other ranks what they need besides gradients in every synchronized backward, and acts on it."""
