"""Launches ranks, with Paceline's agent on a single host and with torchrun's launcher on several hosts.

Ranks started by Slurm or MPI do not use this package; see ``core/schedulers.py``.
"""
