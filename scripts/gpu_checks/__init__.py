"""The checks of ``scripts/gpu_check.py``, and the code that runs them.

``catalogue`` lists the checks, ``children`` runs each in processes of its own, ``screen`` shows the results.
"""
