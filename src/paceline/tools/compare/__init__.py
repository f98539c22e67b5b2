"""Compares ways to train the same program: one device, threads, Paceline's ranks, torch DDP's, and accumulation.

Rooms, each above those that it imports:

    compare_command
    report
    comparison · measured_run
    wrappers
    modes
    launch_together · turn_taking
"""
