"""``paceline checkpoint``."""
