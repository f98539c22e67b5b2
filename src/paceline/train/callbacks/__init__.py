"""Callbacks of the Trainer."""
