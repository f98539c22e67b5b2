"""Counts bytes on the wire: those that one rank sends when a collective moves as little as it can.

The volumes of ring algorithms, which reach the lower bound; see Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends for the sum of `nbytes`: a reduce-scatter and an all-gather."""
    return 2 * (size - 1) * nbytes // size


def all_gather_bytes(nbytes: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends where each contributes `nbytes`."""
    return (size - 1) * nbytes


def all_to_all_bytes(nbytes: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends where each distributes `nbytes`."""
    return (size - 1) * nbytes // size
