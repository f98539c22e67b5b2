"""Compatibility with torch's DDP: members, communication hooks, copying, mixed precision."""
