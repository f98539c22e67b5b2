"""Checks of the wrapper's arguments and module."""
