"""A folder with a ``sitecustomize.py``, prepended to a rank's ``PYTHONPATH``."""
