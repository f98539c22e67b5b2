"""Predicts how fast a training runs on N devices, from a profile of a few or from a description of the job."""
