"""Finds slow ranks in compute times of any origin."""
