"""A run of the Trainer: its result, its state, requests to end it, and its view for callbacks and loggers."""
