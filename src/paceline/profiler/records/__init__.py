"""The records of the ranks: steps and their times, and the files that hold them."""
