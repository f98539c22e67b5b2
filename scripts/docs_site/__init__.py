"""The docs site: Markdown pages, docstrings, notebooks and results, as one source tree for Sphinx.

__main__.py     stages the tree and runs Sphinx: ``make docs``
pages.py        which page stands where
links.py        where a link leads on the site
notebook.py     a notebook, as it was run, as a page
generated.py    pages made from the repository: API reference, decisions, results, sources
"""
