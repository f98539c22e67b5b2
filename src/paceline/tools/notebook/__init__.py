"""Ranks in a notebook: after ``%load_ext paceline`` and ``%dist_init --nproc 2`` every cell runs on all ranks.

    kernel                                         fork server               rank, one process each
    1. cell_parser: which part runs where                                   5. main: serves the kernel
    2. magics, session                                                      6. shell: IPython runs the text
    3. processes: starts and replaces ranks  ──▶   forks               ──▶
    4. execution: sends, waits               ◀──────────── messages ──────▶
       output: lines with their ranks        ◀──────────── a pipe ─────────    printed text
       hang_detection: which rank waits for other ranks
       errors: the message for a failed cell

See ``docs/notebooks.md`` for users, and decision 37 for the reasons against ipyparallel.
"""
