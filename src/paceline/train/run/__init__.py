"""State and result of a training run."""
