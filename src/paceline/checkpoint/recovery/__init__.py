"""Recovery after a failure, and saves that a signal asks for."""
