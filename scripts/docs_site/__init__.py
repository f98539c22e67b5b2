"""Stages Markdown pages, docstrings, notebooks and results as one source tree for Sphinx: ``make docs``.

__main__.py     stages the tree and runs Sphinx
pages.py        the pages of the site, and their order
links.py        links between pages
notebook.py     notebooks as pages
measured.py     measured numbers against their data files
generated.py    pages generated from the repository: API reference, decisions, results, sources
"""
