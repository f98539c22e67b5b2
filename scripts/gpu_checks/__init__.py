"""The checks of ``scripts/gpu_check.py``, and what runs them.

``catalogue`` lists the checks, ``children`` runs each in processes of its own, ``screen`` shows what came out.
"""
