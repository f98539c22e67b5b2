"""Starts ranks: with a loop of its own on one host, through torchrun's own code on several.

The variables of Slurm and MPI, which start ranks without a launcher, are read in ``core/processes/schedulers.py``.
"""
