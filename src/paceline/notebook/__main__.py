"""The program of a notebook's rank, which :mod:`paceline.notebook.processes` starts."""

from paceline.notebook.rank import main

main()
