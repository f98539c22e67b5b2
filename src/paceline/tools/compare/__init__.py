"""Compares ways to train the same program: one device, threads, Paceline's ranks, torch DDP's, and accumulation.

Rooms, each above those that it imports:

    compare_command
    scaling
    report
    comparison · measured_run
    sm_occupancy · wrappers
    modes
    launch_together · turns_progress
    turn_taking
"""
