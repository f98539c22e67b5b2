"""Registered objects: captured, compared, loaded. One rank, no disk."""
