"""Engines of a wrapper: a reducer with its extensions, or a local engine for a single rank or an untrained copy."""
