"""The ``"paceline"`` backend of torch.distributed."""
