"""Adapters for other programs that run training jobs. Each module must be imported explicitly."""
