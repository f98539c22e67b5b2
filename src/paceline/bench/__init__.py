"""Measures what collectives take on this machine: ``paceline bench collectives``.

config.py      what was asked for, checked before a rank starts
variants.py    every way to do a collective: our algorithms, Gloo's own, the shared-memory group's
measure.py     a rank's work: the variants take turns
rows.py        what was found: bandwidths, the fitted model beside it, JSON
report.py      table and plot
"""
