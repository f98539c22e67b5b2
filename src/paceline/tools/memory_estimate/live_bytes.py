"""The bytes of tensors that are alive, operation by operation."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage

from paceline.core.torch_internals.fake_tensors import TorchDispatchMode
from paceline.ddp.transport.sparse import stored_elements
from paceline.nn.data_parallel import nested_tensors

LARGE = 32 * 2**20
"""Bytes of a block that glibc's malloc gives back when it is freed, see DEFAULT_MMAP_THRESHOLD_MAX in ``man mallopt``;
smaller ones come from a heap, and stay."""
Extra = Callable[[Any, tuple[Any, ...], Any], tuple[int, int]]
"""Takes an operator, its arguments and its result. Returns bytes that it has while it runs and that a dispatch mode
does not see, and bytes that its result keeps beside its tensors."""


class LiveBytes(TorchDispatchMode):
    """Counts, while it is entered, the bytes of the storages that operators return, until they are freed.

    A storage counts once, whatever number of tensors share it.

    Args:
        left_out: tensors whose storages do not count.
        extra: bytes of operators beside the tensors that they return.
    """

    def __init__(self, left_out: Iterable[Tensor] = (), extra: Extra | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.beside = 0
        """Bytes among them that are kept beside tensors."""
        self.peak = 0
        """Largest number of bytes that were alive since the start, or since :meth:`restart`."""
        self.added = Counter[int]()
        """Bytes of all storages that were counted, by the bytes of each."""
        self.calls: dict[str, set[str]] = defaultdict(set)
        """Different calls of each operator with a workspace, by its name: shapes, strides and the like."""
        self.workspaces = Counter[str]()
        """Most bytes that each operator had beside tensors while it ran, by its name."""
        self._extra = extra
        self._alive: dict[int, weakref.ref[UntypedStorage]] = {}
        """The storages that are alive, by their identity; a reference takes its entry away when its storage dies."""
        for tensor in left_out:
            self.add(tensor, counts=False)

    def add(self, tensor: Tensor, beside: int = 0, *, counts: bool = True) -> None:
        """Count the storage of `tensor`, and bytes `beside` it, until it is freed."""
        storage = stored_elements(tensor).untyped_storage()
        if (key := id(storage)) in self._alive:
            return
        nbytes = (storage.nbytes() + beside) * counts
        self._alive[key] = weakref.ref(storage, partial(self._freed, key, nbytes, beside))
        self.added[nbytes] += nbytes
        self.beside += beside
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    @property
    def small_share(self) -> float:
        """Share of all bytes that are in blocks smaller than :data:`LARGE`."""
        return sum(total for size, total in self.added.items() if size < LARGE) / max(1, self.added.total())

    @property
    def equal_share(self) -> float:
        """Share of all bytes, on average, that are in blocks of the same size as a given one."""
        return sum(total**2 for total in self.added.values()) / max(1, self.added.total() ** 2)

    def restart(self) -> None:
        """Begin the peak again with the present bytes."""
        self.peak = self.now

    def _freed(self, key: int, nbytes: int, beside: int, _reference: object) -> None:
        del self._alive[key]
        self.now -= nbytes
        self.beside -= beside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        during, kept = (0, 0) if self._extra is None else self._extra(func, args, result)
        name = func.overloadpacket.__name__
        if during:
            self.calls[name].add(str([each.shape if isinstance(each, Tensor) else each for each in args]))
            self.workspaces[name] = max(self.workspaces[name], during)
        tensors = list(nested_tensors(result))
        for tensor in tensors:
            self.add(tensor, kept if tensor is tensors[-1] else 0)
        self.peak = max(self.peak, self.now + during)
        return result
