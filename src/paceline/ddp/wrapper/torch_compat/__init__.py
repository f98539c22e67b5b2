"""The interface of torch's own DDP: members, communication hooks, copying, mixed precision."""
