"""Running means, loggers and the progress display."""
