"""Compares the ranks' status in every synchronized backward pass and acts on differences."""
