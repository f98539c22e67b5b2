"""The report of a profile: its values, and how they are put into words."""
