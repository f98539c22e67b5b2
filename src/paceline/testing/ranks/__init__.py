"""Forked ranks of a test, and their outcomes."""
