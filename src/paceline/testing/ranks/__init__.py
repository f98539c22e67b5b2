"""Forked ranks, and how they ended."""
