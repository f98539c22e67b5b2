"""Encodes, decodes and verifies checkpoint files, independently of the rest of ``paceline.checkpoint``."""
