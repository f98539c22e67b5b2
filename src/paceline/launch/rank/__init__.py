"""Parts of the launcher that run inside a rank, and the files and streams of ranks."""
