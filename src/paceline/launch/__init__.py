"""Starts ranks: through a thin adapter of torchelastic on one host, through torchrun's own code on several.

Rooms, each above those that it imports:

    multi_host · program
    job
    agent
    fork_server · restart_policy
    watching
    failures
    host_limits · pinning · rank · rendezvous
"""
