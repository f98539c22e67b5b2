"""Pages of memory in which a rank publishes numbers that other processes can read at any time.

A page is a file of :data:`SIZE` bytes on a file system in memory. The rank maps it and writes without a system call, so
the last numbers survive SIGKILL. A rank has two kinds of pages, because they live for different times:

    rank-<local rank>            :class:`~paceline.core.black_box.Snapshot`: made and cleared by the launcher, one for
                                 each process, for displays and failure reports
    steps/<key>/rank-<rank>      :class:`~paceline.core.step_progress.StepRecord`: made by the rank, one for each
                                 checkpoint folder; the launcher keeps it after the rank's end, to plan the restart

The body of each class is the table of the page's fields, in the order in which they stand in memory. To add a field,
add a line to the table: at its end, or anywhere if :data:`VERSION` increases. Nothing else knows places or formats.

Every number begins at a multiple of 8 bytes and is copied as a whole, so no reader sees half of it. Fields that are
written together (:meth:`Page.area`) may be read during the write; then they do not belong together.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

SIZE = 4096
VERSION = 3
MAGIC = int.from_bytes(b"PACELINE", "little")


class Field:
    """A field of a page; `code` is its format in :mod:`struct`: q for an int, d for a float, 200s for bytes."""

    def __init__(self, code: str) -> None:
        self.code, form = code, struct.Struct(code)
        self._size, self._pack, self._unpack_from = form.size, form.pack, form.unpack_from

    def __set_name__(self, page: type[Page], name: str) -> None:
        self.place = slice(page.end, page.end + self._size)
        page.end, self._start = self.place.stop, self.place.start
        assert page.end <= SIZE, f"{name} is beyond the end of the page"

    def __get__(self, page: Page, kind: type[Page]) -> Any:
        return self._unpack_from(page.memory, self._start)[0]

    def __set__(self, page: Page, value: Any) -> None:
        # Not pack_into(), which writes zeros first that another process could read.
        page.memory[self.place] = self._pack(value)


def field(code: str) -> Any:
    """Declare a field. A type checker sees the type of its value: ``steps: int = field("q")``."""
    return Field(code)


class Area(NamedTuple):
    """Consecutive fields that are written together: ``memory[area.place] = area.pack(...)``."""

    place: slice
    pack: Callable[..., bytes]
    unpack: Callable[[bytes], tuple[Any, ...]]


class Page:
    """The fields of a page in `memory`: a file that is mapped, or a copy of its bytes."""

    end: ClassVar[int] = 0
    """Offset after the last field."""
    magic: int = field("q")
    """:data:`MAGIC` once the page has all its fields; 0 before."""
    version: int = field("q")
    """:data:`VERSION` of the Paceline that wrote the page."""
    pid: int = field("q")
    """The rank's process."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Page) and self.memory == other.memory

    @classmethod
    def area(cls, first: str, last: str | None = None) -> Area:
        """Return the area from the field `first` to the field `last`, by default the same."""
        table = {n: f for base in reversed(cls.__mro__) for n, f in vars(base).items() if isinstance(f, Field)}
        place = slice(table[first].place.start, table[last or first].place.stop)
        codes = [field.code for field in table.values() if place.start <= field.place.start < place.stop]
        form = struct.Struct("".join(codes))
        return Area(place, form.pack, form.unpack)


def map_page(path: Path, *, writable: bool = False) -> mmap.mmap:
    """Map the page in the file `path`."""
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def write_page(path: Path, page: bytes) -> None:
    """Write `page` to a new file, or into the memory of an existing file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, page) < len(page):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
