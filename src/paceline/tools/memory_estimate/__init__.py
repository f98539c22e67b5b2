"""Estimates the memory of each rank in training before anything is allocated: ``paceline estimate-memory``.

Decisions 40 and 52 say what is counted exactly, and how the peak is estimated.
"""
