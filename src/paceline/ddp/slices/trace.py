"""A trace of a slice's operators, which tells where two computations of it begin to differ, and why.

Each operator is recorded with the module that runs it, and digests of the tensors that it reads and of those that it
returns or changes. The first operator that returns other bits for the same input is the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from paceline.core.state.digests import quick_digest
from paceline.core.state.unwrapping import plain_name
from paceline.core.torch_internals.fake_tensors import TorchDispatchMode
from paceline.core.torch_internals.tensors import is_plain, tree_leaves

_WRAPPER = "DistributedDataParallel.module"
"""The tracker's name of the wrapped module."""


@dataclass(frozen=True)
class Call:
    """One call of an operator."""

    module: str
    """Name of the innermost module; empty for the model itself, and for code outside of it."""
    operator: str
    draws: bool
    """Whether it was given a random generator that is not the device's default one."""
    read: tuple[int, ...]
    """Digests of its input tensors and numbers."""
    returned: tuple[int, ...]
    """Digests of the tensors that it returned; none for memory without values."""

    def differs(self, other: Call) -> bool:
        """Return whether another computation did something else here."""
        # Not by input: memory that is about to be overwritten holds whatever was there.
        return (self.module, self.operator, self.returned) != (other.module, other.operator, other.returned)


class Trace(TorchDispatchMode):
    """Records every operator while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._tracker = ModuleTracker()

    def __enter__(self) -> Trace:
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = (*_digests((args, kwargs)), *_numbers((args, kwargs)))
        result = func(*args, **kwargs)
        draws = any(_is_private(value) for value in (*args, *kwargs.values()))
        returned = () if "empty" in str(func) else _digests(result)
        self.calls.append(Call(self._module(), str(func), draws, read, returned))
        return result

    def _module(self) -> str:
        innermost = max(self._tracker.parents, key=lambda name: (name.count("."), name))
        inside = innermost.partition(_WRAPPER)[2]
        return plain_name(inside.removeprefix("."))


def _digests(values: Any) -> tuple[int, ...]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor) and is_plain(value)]
    return tuple(int(quick_digest(tensor)) for tensor in tensors)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return hashes of the numbers, such as a factor, which may have come from anywhere."""
    return tuple(hash(value) for value in tree_leaves(values) if isinstance(value, int | float | complex))


def _is_private(value: Any) -> bool:
    if not isinstance(value, torch.Generator):
        return False
    if value.device.type == "cuda":
        return value not in torch.cuda.default_generators
    return value is not torch.default_generator


def find_difference(first: Sequence[Call], second: Sequence[Call], kinds: dict[str, str]) -> str | None:
    """Say where two traces of one slice begin to differ, and why; None if they do not.

    Args:
        first, second: the traces.
        kinds: class names of the modules, by name.
    """
    for one, other in zip_longest(first, second):
        call = one or other
        assert call is not None
        if one is not None and other is not None and not one.differs(other):
            continue
        where = f"module {call.module!r} ({kinds.get(call.module, 'unknown')})" if call.module else _outside(kinds)
        if one is None or other is None or (one.module, one.operator) != (other.module, other.operator):
            return f"{where}, which calls other operators each time, such as {call.operator}"
        if call.draws:
            return f"{where}, where {call.operator} draws from a generator of its own"
        if one.read != other.read or not one.read:
            return (
                f"{where}, where {call.operator} uses values from outside of the slice, such as a private generator's, "
                "a clock's, or those of an earlier forward"
            )
        return f"{where}, where {call.operator} returns other bits for the same input"
    return None


def _outside(kinds: dict[str, str]) -> str:
    return f"the model itself ({kinds.get('', 'unknown')}), or in the loop"


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Return the class names of all modules in `module`, by name."""
    return {plain_name(name): type(part).__name__ for name, part in module.named_modules()}
