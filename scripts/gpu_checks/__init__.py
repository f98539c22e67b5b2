"""The checks of ``scripts/gpu_check.py`` and the code that runs them.

``catalogue`` lists the checks, ``children`` runs each in separate processes, ``screen`` shows the results.
"""
