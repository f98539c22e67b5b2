"""Adapters for other programs that run training jobs; import each by name."""
