"""The folder that is put in front of a rank's ``PYTHONPATH``; see ``sitecustomize.py``."""
