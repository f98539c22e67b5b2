"""Restores a checkpoint into registered objects, and loads weights without them."""
