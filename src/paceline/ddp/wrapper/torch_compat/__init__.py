"""torch DDP's own interface: members, communication hooks, copying, mixed precision."""
