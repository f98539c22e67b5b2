"""Which rank failed first, and why. Pure values."""
