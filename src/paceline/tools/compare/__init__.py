"""Compares ways to train the same program: one device, threads, torch DDP, Paceline, and different numbers of ranks."""
