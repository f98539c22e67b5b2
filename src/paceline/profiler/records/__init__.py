"""The files of the ranks' records."""
