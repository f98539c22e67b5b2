"""Compares ways to train the same program: one device, threads, Paceline's ranks, torch DDP's, and accumulation."""
