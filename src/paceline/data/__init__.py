"""Which samples a rank trains on, and where it stands among them."""

from paceline.data.distributed import DistributedSampler
from paceline.data.loader import DataLoader
from paceline.data.sampler import GlobalBatchSampler
from paceline.data.stream import GlobalBatchStream

__all__ = [
    "DataLoader",
    "DistributedSampler",
    "GlobalBatchSampler",
    "GlobalBatchStream",
]
