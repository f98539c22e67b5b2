"""Means, loggers, progress."""
