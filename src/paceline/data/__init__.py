"""Samplers and loaders over global batches. Every rank gets its slice of each batch, and the position can be saved."""

from paceline.data.loader import DataLoader
from paceline.data.sampler import GlobalBatchSampler
from paceline.data.stream import GlobalBatchStream

__all__ = ["DataLoader", "GlobalBatchSampler", "GlobalBatchStream"]
