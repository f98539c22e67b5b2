"""States on their way between the ranks and rank 0."""
