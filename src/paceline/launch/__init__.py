"""Starts ranks: through a thin adapter of torchelastic on one host, through torchrun's own code on several."""
