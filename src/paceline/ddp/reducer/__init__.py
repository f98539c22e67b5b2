"""Averages gradients during backward: buckets, hooks, and the step from an output to the averages."""
