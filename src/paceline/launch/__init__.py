"""Starting ranks: a thin adapter of torchelastic for one host, and torchrun's own paths for several."""
