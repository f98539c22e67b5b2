"""Estimates the memory of each rank in training before anything is allocated: ``paceline estimate-memory``.

See decision 40 for the exact parts and decision 52 for the estimated peak.
"""
