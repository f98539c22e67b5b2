"""From records to figures, verdict and advice."""
