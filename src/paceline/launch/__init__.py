"""Launcher of ranks: Paceline's agent on one host, torchrun's on several.

Ranks that Slurm or MPI starts have no launcher; see ``core/processes/schedulers.py``.
"""
