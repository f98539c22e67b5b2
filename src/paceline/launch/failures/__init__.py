"""Failure analysis: finds the rank that failed first, and the cause."""
