"""The interface of torch's DDP: members, communication hooks, copying, mixed precision."""
