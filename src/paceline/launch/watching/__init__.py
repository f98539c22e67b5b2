"""Watches ranks while they run: signals, hangs, preemption and termination."""
