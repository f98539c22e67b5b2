"""Synchronous and asynchronous saves."""
