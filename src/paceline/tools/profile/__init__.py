"""``paceline profile``."""
