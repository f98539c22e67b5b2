"""The engine of a wrapper: a reducer with its extensions, a single rank, or a copy that is not connected yet."""
