"""Layers that compute over the whole global batch."""

from paceline.nn.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
