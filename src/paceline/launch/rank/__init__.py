"""Parts of the launcher that run in a rank, and its files and streams."""
