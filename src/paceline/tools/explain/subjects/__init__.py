"""The subjects of ``paceline explain``: each computes an example and returns it as scenes with tables."""
