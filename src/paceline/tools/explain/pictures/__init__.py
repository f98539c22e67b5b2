"""The pictures: each from an example that is computed, not drawn."""
