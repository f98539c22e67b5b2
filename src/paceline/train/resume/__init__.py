"""Saving and resuming runs: checks that settings and data are unchanged, and writes checkpoints."""
