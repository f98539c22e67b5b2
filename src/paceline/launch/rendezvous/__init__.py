"""Stores on loopback, through which the ranks of one host meet."""
