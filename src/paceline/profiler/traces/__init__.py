"""One trace of all ranks, for Perfetto."""
