"""Times collectives on this machine: ``paceline bench collectives``.

bench_command.py    the command line
bench_config.py     the options, checked before a rank starts
turns.py            variants take turns; the benchmarks of the repository use it, too
backends.py         every way to do a collective: our algorithms, Gloo's own, the shared-memory group's
measure.py          a rank's work: each variant is checked, then they take turns
rows.py             the measurements: bandwidths, and the fitted model beside them
report.py           table and JSON
plot.py             the plot
"""
