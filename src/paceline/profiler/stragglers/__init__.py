"""Slow ranks, found in times alone."""
