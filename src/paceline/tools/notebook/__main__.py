"""The program of a notebook's rank, which :mod:`paceline.tools.notebook.processes` starts."""

from paceline.tools.notebook.rank import main

main()
