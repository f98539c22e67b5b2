"""Averages gradients during backward: buckets, hooks, and the step from the outputs' hooks to the averages."""
