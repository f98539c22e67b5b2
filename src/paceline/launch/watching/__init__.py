"""Signals, hangs, preemption, termination."""
