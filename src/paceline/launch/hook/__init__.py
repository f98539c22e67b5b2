"""The first folder of a rank's ``PYTHONPATH``, with a ``sitecustomize.py``."""
