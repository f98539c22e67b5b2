"""Loaded last by the fork server: what it has loaded is left out of its children's garbage collections.

One would look at each of half a million objects, and thereby copy the memory in which they lie: 0.4 s in every child.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
