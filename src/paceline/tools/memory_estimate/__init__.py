"""Estimates the memory of each rank in training before anything is allocated: ``paceline estimate-memory``."""
