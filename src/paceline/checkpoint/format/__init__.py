"""Encodes, decodes and verifies the files of a checkpoint. Imports nothing else of the package."""
