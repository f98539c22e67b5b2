"""The program of a notebook's rank, which :mod:`paceline.tools.notebook.kernel.processes` starts."""

from paceline.tools.notebook.rank.main import main

main()
