"""Timing of collectives on this machine: ``paceline bench collectives``."""
