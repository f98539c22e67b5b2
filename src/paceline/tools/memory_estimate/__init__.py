"""Estimates the memory that each rank needs in training, before any is allocated: ``paceline estimate-memory``.

See decision 40 for the exact parts and decision 52 for the estimated peak.
"""
