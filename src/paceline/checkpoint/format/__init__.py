"""The files of a checkpoint: encoded, decoded, verified. Imports nothing else of the package."""
