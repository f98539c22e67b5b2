"""The ranks' records: steps and their times, and the files that hold them."""
