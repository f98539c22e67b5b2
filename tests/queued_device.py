"""A simulated GPU with deferred execution: streams, collectives and an allocator, on the CPU.

Operations on its tensors are queued in the current stream. :meth:`QueuedDevice.run` executes them in the requested
order, each stream as early or as late as the waits between streams allow, so a missing wait gives wrong numbers in
some order. Freed memory is reused as soon as a GPU's allocator could reuse it; later uses are recorded. Reading a value
on the host is an error, because it would make the host wait for the GPU.

    device.use(monkeypatch)
    with device:
        x = device.zeros(3) + 1
    device.run(device.streams)
    device.value(x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from insides import TorchDispatchMode, device_streams, tree_leaves, tree_map_only

_ASKS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "is_nonzero"}
_UNFILLED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class HostAsked(AssertionError):
    """The host read a value that is not computed yet."""


class Stream:
    """Operations in order, and waits for positions in other streams."""

    def __init__(self, name: str) -> None:
        self.name, self.items, self.done = name, [], 0
        """`done` is the number of executed `items`."""

    def put(self, item: Callable[[], None] | tuple[Stream, int]) -> None:
        """Add an operation, or a wait until another stream has executed a number of items."""
        self.items.append(item)

    def wait_stream(self, other: Stream) -> None:
        """Wait for everything currently queued in `other`."""
        self.put((other, len(other.items)))

    def is_ready(self) -> bool:
        """Return whether the next item can be executed."""
        if self.done == len(self.items):
            return False
        item = self.items[self.done]
        return callable(item) or item[0].done >= item[1]

    def step(self) -> None:
        """Execute the next item."""
        item = self.items[self.done]
        if callable(item):
            item()
        self.done += 1


class Memory:
    """Memory of a tensor and its views."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.bytes = bytearray(b"\xff" * max(16, nbytes + -nbytes % 16))  # NaN until written
        self.begin = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()
        self.stream, self.users, self.is_reused = stream, set[Stream](), False
        """The stream that allocated the memory, and the other streams recorded as users."""
        self.owner: Any = None

    def reset(self) -> None:
        """Discard the contents."""
        self.is_reused = False
        self.bytes[:] = b"\xff" * len(self.bytes)

    def tensor(self, like: Tensor, offset: int = 0) -> Tensor:
        """Return a tensor like `like` at a byte offset into the memory, without counting as a user."""
        if not like.numel():
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        count = (len(self.bytes) - offset) // like.element_size()
        flat = torch.frombuffer(self.bytes, dtype=like.dtype, offset=offset, count=count)
        return flat.as_strided(like.size(), like.stride())


class QueuedDevice(TorchDispatchMode):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.network = Stream("main"), Stream("side"), Stream("network")
        self.streams = (self.main, self.side, self.network)
        self.current = self.main
        self.used_late: list[str] = []
        """Operations of the last run on memory that could have been reused."""
        # All memory, and the memory in use by address.
        self._memories: list[Memory] = []
        self._live: dict[int, Memory] = {}
        self._reuses: list[Stream] = []

    # -- the functions of paceline.core.device_streams ----------------------------------------------

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the functions that handle device streams."""
        patch.setattr(device_streams, "is_queued", lambda _: True)
        for module in ("paceline.compression.pipeline", "paceline.ddp.finisher"):
            patch.setattr(f"{module}.is_queued", lambda _: True)
        patch.setattr(device_streams, "new_stream", lambda _: self.side)
        patch.setattr(device_streams, "current_stream", lambda _: self.current)
        patch.setattr(device_streams, "use_stream", self.on)
        patch.setattr(device_streams, "keep_for", lambda stream, tensor: self._memory_of(tensor).users.add(stream))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Queue operations on `stream`."""
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    # -- operations -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._find_dropped()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        is_ours = any(self._memory_of(tensor) for tensor in tensors)
        if tensors and not is_ours:
            return func(*args, **kwargs)
        if name in _ASKS:
            raise HostAsked(f"the host reads a value: {name}")
        if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments):
            return func(*args, **kwargs)  # a view
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.name in given]
        real = tree_map_only(Tensor, self._alias, (args, kwargs))
        if written:
            self._put(name, lambda: func(*real[0], **real[1]), tensors)
            return written[0] if schema.returns else None
        metas, options = tree_map_only(Tensor, _meta, (args, kwargs))
        if "generator" in options:
            options["generator"] = None
        if "device" in options or not tensors:
            options["device"] = torch.device("meta")
        results = tree_map_only(Tensor, self._allocate, func(*metas, **options))
        if name not in _UNFILLED:
            places = [self._alias(result) for result in tree_leaves(results)]
            self._put(name, partial(_fill, places, func, real, _seed(kwargs)), [*tensors, *tree_leaves(results)])
        return results

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """Return zeros on this device."""
        tensor = self._allocate(torch.empty(numel, dtype=dtype, device="meta"))
        place = self._alias(tensor)
        self._put("zeros", lambda: place.zero_(), [tensor])
        return tensor

    def collective(self, function: Callable[..., None], *tensors: Tensor) -> Work:
        """Launch a collective that calls `function` with `tensors`."""
        real = [self._alias(tensor) for tensor in tensors]
        self.network.wait_stream(self.current)
        with self.on(self.network):
            self._put("collective", lambda: function(*real), list(tensors))
        return Work(self, tensors)

    def _put(self, name: str, operation: Callable[[], Any], tensors: Sequence[Tensor]) -> None:
        used = [memory for tensor in tensors if (memory := self._memory_of(tensor)) is not None]
        stream = self.current

        def carry_out() -> None:
            if any(memory.is_reused for memory in used):
                self.used_late.append(f"{name} on {stream.name}")
            operation()

        stream.put(carry_out)

    # -- memory -----------------------------------------------------------------------------------------------------

    def _allocate(self, like: Tensor) -> Tensor:
        extents = [(size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True)]
        memory = Memory((sum(extents) + 1) * like.element_size(), self.current)
        tensor = memory.tensor(like)
        if like.numel():
            memory.owner = StorageWeakRef(tensor.untyped_storage())
            self._memories.append(memory)
            self._live[memory.begin] = memory
        return tensor

    def _memory_of(self, tensor: Tensor) -> Memory | None:
        return self._live.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _alias(self, tensor: Tensor) -> Tensor:
        memory = self._memory_of(tensor)
        return tensor if memory is None else memory.tensor(tensor, tensor.data_ptr() - memory.begin)

    def _find_dropped(self) -> None:
        """Queue freed memory for reuse once its streams have executed everything queued before."""
        for memory in [memory for memory in self._live.values() if memory.owner.expired()]:
            del self._live[memory.begin]
            reuse = Stream("reuse")
            for stream in {memory.stream, *memory.users}:
                reuse.wait_stream(stream)
            reuse.put(partial(_take, memory))
            self._reuses.append(reuse)

    # -- execution --------------------------------------------------------------------------------------------------

    def run(self, order: Sequence[Stream]) -> None:
        """Execute everything from the beginning; earlier streams in `order` go first as far as waits allow."""
        self._find_dropped()
        self.used_late.clear()
        for memory in self._memories:
            memory.reset()
        for stream in (*self._reuses, *order):
            stream.done = 0
        while (ready := next((s for s in (*self._reuses, *order) if s.is_ready()), None)) is not None:
            ready.step()
        stuck = [stream.name for stream in order if stream.done < len(stream.items)]
        assert not stuck, f"deadlocked streams: {stuck}"

    def value(self, tensor: Tensor) -> Tensor:
        """Return the value of `tensor` after :meth:`run`."""
        return self._alias(tensor).clone()


class Work:
    """A running collective; like torch's work for NCCL, it keeps its tensors alive until :meth:`wait`."""

    def __init__(self, device: QueuedDevice, tensors: Sequence[Tensor]) -> None:
        self._device, self._kept = device, tensors
        self._position = len(device.network.items)

    def wait(self) -> None:
        """Make the current stream wait."""
        self._device.current.put((self._device.network, self._position))
        self._kept = ()

    def is_completed(self) -> bool:
        """Return False: nothing completes before :meth:`QueuedDevice.run`."""
        return False


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _seed(options: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that restores the current state of the generator in `options`."""
    if (generator := options.get("generator")) is None:
        return lambda: None
    return partial(generator.set_state, generator.get_state())


def _fill(places: Sequence[Tensor], func: Any, given: Any, seed: Callable[[], Any]) -> None:
    args, kwargs = given
    seed()
    for place, result in zip(places, tree_leaves(func(*args, **kwargs)), strict=True):
        place.copy_(result)


def _take(memory: Memory) -> None:
    memory.reset()
    memory.is_reused = True
