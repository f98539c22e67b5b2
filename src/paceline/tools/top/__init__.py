"""A live view of a running job, read from its ranks' black boxes: ``paceline top``."""
