"""A live view of a running job, from its ranks' black boxes: ``paceline top``."""
