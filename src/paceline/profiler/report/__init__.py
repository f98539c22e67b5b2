"""The report of a profile as values and words."""
