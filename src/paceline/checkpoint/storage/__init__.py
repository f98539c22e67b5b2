"""The folder of step folders: lock, atomic rename, free space."""
