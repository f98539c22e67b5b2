"""Programs of others that run trainings, told how to run ours: one module for each, imported by name."""
