"""Analysis of records: figures, verdict and advice."""
