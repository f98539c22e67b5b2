"""The pictures: each is drawn from an example that is computed."""
