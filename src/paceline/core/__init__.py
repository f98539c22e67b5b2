"""Modules shared by several packages. They import only each other and the errors."""

OWN_BACKEND = "paceline"
"""Name of the backend that ``import paceline`` registers, except in the process of the command line."""
