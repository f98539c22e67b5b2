"""The heap of a training process: the memory that malloc holds, including holes that are too small to reuse."""

from __future__ import annotations

from collections import deque

THRESHOLDS = (2**17, 2**25)
"""Bounds of glibc's adaptive threshold; it maps larger blocks on their own (``man mallopt``)."""
SMALL = 4096
"""Bytes below which blocks do not matter."""
SLACK = 96
"""Bytes that an aligned allocation needs besides the block. Small objects take them soon after."""
LIFETIME = 32
"""Number of later blocks until these small objects are free; fitted to measured peaks (decision 52)."""
GROWTH = 1.25
"""Factor for other fragmentation, such as by buffers of matrix multiplications; also fitted."""
Block = tuple[int | None, int]
"""Address and bytes of a block; the address is None if the block is mapped on its own."""


class Heap:
    """Places blocks like glibc's ``posix_memalign``, by the best fit among the holes, but without touching memory.

    A hole is too small for another block of the same size as long as small objects occupy the slack beside it. This is
    why temporaries of many layers take new memory although earlier ones are free.
    """

    def __init__(self) -> None:
        self.peak = self._top = self._mapped = 0
        self._threshold = THRESHOLDS[0]
        self._ends: dict[int, int] = {}  # of each hole, by its start
        self._starts: dict[int, int] = {}
        self._occupied: deque[int] = deque()

    def allocate(self, size: int) -> Block:
        """Return a new block."""
        start: int | None = None
        if size > self._threshold:
            self._mapped += size
        elif size >= SMALL:
            needed = size + SLACK
            fits = ((end - start, start) for start, end in self._ends.items() if end - start >= needed)
            length, start = min(fits, default=(needed, self._top))
            self._starts.pop(self._ends.pop(start, start), None)
            self._top = max(self._top, start + needed)
            if length > needed:
                self._free(start + needed, length - needed)
            self._occupied.append(start + size)
            self.drop_small_objects(LIFETIME)
        self.peak = max(self.peak, int(GROWTH * self._top) + self._mapped)
        return start, size

    def drop_small_objects(self, kept: int = 0) -> None:
        """Free all small objects but the last `kept`."""
        while len(self._occupied) > kept:
            self._free(self._occupied.popleft(), SLACK)

    def free(self, *blocks: Block) -> None:
        """Free blocks."""
        for start, size in blocks:
            if start is not None:
                self._free(start, size)
            elif size >= SMALL:
                self._mapped -= size
                self._threshold = max(self._threshold, size if size < THRESHOLDS[1] else 0)

    def _free(self, start: int, size: int) -> None:
        """Make a hole, merged with the holes beside it."""
        end = self._ends.pop(start + size, start + size)
        start = self._starts.pop(start, start)
        self._starts.pop(end, None)
        self._ends.pop(start, None)
        if end == self._top:
            self._top = start
        else:
            self._ends[start], self._starts[end] = end, start
