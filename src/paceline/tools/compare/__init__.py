"""Compares modes of training a program (one device, threads, torch DDP, Paceline) or different numbers of ranks."""
