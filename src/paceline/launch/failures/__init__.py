"""Analysis of failures: the first rank to fail, and the cause. Pure values."""
