"""Compares ways to train the same program: one device, threads, Paceline's ranks, torch DDP's, and accumulation.

Rooms, each above those that it imports:

    __main__ · compare_command
    bars · measured_run
    comparison · stand_ins
    modes
    gradient_reduction · launch_together · turn_taking
"""
