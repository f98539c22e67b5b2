"""Encodes, decodes and verifies the files of a checkpoint. Imports nothing else from the package."""
