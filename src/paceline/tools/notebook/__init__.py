"""Ranks in a notebook: after ``%load_ext paceline`` and ``%dist_init --nproc 2`` every cell runs on all ranks.

    kernel                                         fork server               rank, one process each
    1. cell_text: which part runs where                                     5. rank: serves the kernel
    2. magics, notebook_session                                             6. shell: IPython runs the text
    3. processes: starts and replaces ranks  ──▶   forks               ──▶
    4. conversation: sends, waits            ◀──────────── messages ──────▶
       screen, folding: output with its rank ◀──────────── a pipe ─────────    what is printed
       waiting: who waits for ranks that do not come
       problems: the words for what failed

``docs/notebooks.md`` is for users; decision 37, ``ranks-of-notebooks-are-ours``, says why this is not ipyparallel.
"""
