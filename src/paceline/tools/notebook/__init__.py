"""Ranks in a notebook: after ``%load_ext paceline`` and ``%dist_init --nproc 2`` every cell runs on all ranks.

    kernel                                         fork server               rank, one process each
    1. cell_parser: which part runs where                                   5. rank: serves the kernel, and runs
    2. magics, session                                                         the text in IPython
    3. processes: starts and replaces ranks  ──▶   forks               ──▶
    4. execution: sends, waits, finds hangs  ◀──────────── messages ──────▶
       and words the error of a failed cell
       output: lines with their ranks        ◀──────────── a pipe ─────────    printed text

See ``docs/notebooks.md`` for users, and decision 37 for the reasons against ipyparallel.
"""
