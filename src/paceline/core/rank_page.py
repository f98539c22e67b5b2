"""Pages of memory in which a rank publishes numbers that other processes can read at any time.

A page is a file of :data:`SIZE` bytes on a file system in memory. The rank maps it and writes without a system call, so
the last numbers survive SIGKILL. A rank has two kinds of pages, because they live for different times:

    rank-<local rank>            :class:`~paceline.core.black_box.Snapshot`: made and cleared by the launcher, one for
                                 each process, for displays and failure reports
    steps/<key>/rank-<rank>      :class:`~paceline.core.step_progress.StepRecord`: made by the rank, one for each
                                 checkpoint folder; the launcher keeps it after the rank's end, to plan the restart

The body of each class is the table of the page's fields, in the order in which they stand in memory. To add a field,
add a line to the table, at the end, or after any field if :data:`VERSION` increases. Nothing else knows its place.

Every field begins at a multiple of 8 bytes, so a number is never seen half-written. Fields that are written together
(:meth:`Page.area`) may be read during the write: they are then each valid, but do not belong together.
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
    """A place in a page, of `size` bytes; `code` is its format in :mod:`struct`."""

    def __init__(self, code: str, size: int) -> None:
        self.code, self._size = code, size

    def __set_name__(self, page: type[Page], name: str) -> None:
        self.place = slice(page.end, page.end + self._size)
        page.end, self._index = self.place.stop, self.place.start // 8
        assert page.end <= SIZE, f"{name} is beyond the end of the page"


class _Number(Field):
    def __get__(self, page: Page, kind: type[Page]) -> Any:
        return page.views[self.code][self._index]

    def __set__(self, page: Page, value: float) -> None:
        page.views[self.code][self._index] = value


class _Bytes(Field):
    def __get__(self, page: Page, kind: type[Page]) -> bytes:
        return bytes(page.memory[self.place]).rstrip(b"\0")

    def __set__(self, page: Page, value: bytes) -> None:
        page.memory[self.place] = value.ljust(self._size, b"\0")


def whole() -> Any:
    """Declare a field that holds an int."""
    return _Number("q", 8)


def real() -> Any:
    """Declare a field that holds a float."""
    return _Number("d", 8)


def text(size: int) -> Any:
    """Declare a field that holds at most `size` bytes, a multiple of 8, without zeros at the end."""
    return _Bytes(f"{size}s", size)


class Area(NamedTuple):
    """Consecutive fields that are written together: ``memory[area.place] = area.pack(...)``."""

    place: slice
    pack: Callable[..., bytes]
    unpack: Callable[[bytes], tuple[Any, ...]]


class Page:
    """The fields of a page in `memory`: a file that is mapped, or a copy of its bytes."""

    end: ClassVar[int] = 0
    """Offset after the last field."""
    magic: int = whole()
    """:data:`MAGIC` once the page has all its fields; 0 before."""
    version: int = whole()
    """:data:`VERSION` of the Paceline that wrote the page."""
    pid: int = whole()
    """The rank's process."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        # Assigning an item of a view stores the whole number with one instruction.
        self.views: dict[str, memoryview[Any]] = {code: memoryview(memory).cast(code) for code in "qd"}  # type: ignore[call-overload]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Page) and self.memory == other.memory

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def area(cls, *names: str) -> Area:
        """Return the area of the fields `names`, which must be consecutive."""
        fields = [vars(base)[name] for name in names for base in cls.__mro__ if name in vars(base)]
        form = struct.Struct("".join(field.code for field in fields))
        place = slice(fields[0].place.start, fields[-1].place.stop)
        assert form.size == place.stop - place.start, f"{names} are not consecutive"
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
