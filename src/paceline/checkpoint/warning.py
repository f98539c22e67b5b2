"""The category of the warnings that checkpoints give."""


class CheckpointWarning(UserWarning):
    """What users should know of their checkpoints: a damaged one was skipped, a folder is not locked."""
