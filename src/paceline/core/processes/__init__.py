"""The ranks of a job: who they are, and how they find each other."""

OWN_BACKEND = "paceline"
"""Name of the backend that ``import paceline`` registers, except in the process of the command line."""
