"""Says how much memory a training takes on each rank, before anything is allocated: ``paceline estimate-memory``."""
