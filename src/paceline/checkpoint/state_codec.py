"""Encodes nested states as plain JSON and a flat set of named tensors, and decodes them, without pickle.

``None``, booleans, integers, finite floats, strings and lists are stored unchanged. Everything else is an object with
one key, its kind::

    {"dict": {"lr": 0.1}}             a dict with string keys    {"items": [[0, ...]]}    a dict with other keys
    {"OrderedDict": ...}, {"Counter": ...}   with the node of a dict inside
    {"tuple": [...]}, {"Size": ...}   a tuple, a torch.Size      {"bytes": "aGk="}        base64
    {"float": "nan"}                  nan, -nan, inf or -inf     {"int": "-0x1f..."}      beyond 64 bits
    {"tensor": "state.0.exp_avg"}     a tensor by its name       {"complex tensor": ...}  stored as reals
    {"dtype": "torch.int8"}           a torch.dtype
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.checkpoint.safetensors_file import CODES
from paceline.core import strict_json
from paceline.core.torch_distributed import is_sharded

_SAME_HASH = 100  # maximum number of a dict's keys with the same hash; a lookup compares all of them
_PLAIN = (torch.Tensor, torch.nn.Parameter)
DEPTH = 100  # maximum depth of nesting; also stops at a value that contains itself


class Unencodable(Exception):
    """A value that has no encoding, at ``path``, such as ``['lr_lambdas'][0]``."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Encoder:
    """Encodes values and collects their tensors in :attr:`tensors`, named by their path.

    A tensor in the same memory as an earlier one (tied weights) is not collected again. Both nodes refer to the first
    tensor, and :attr:`aliases` maps the second name to the first.

    Args:
        gather: turns a DTensor into the tensor to collect. Without it, DTensors are rejected. Tied DTensors are
            collected under each name.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self._gather = gather
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, prefix: str = "") -> Any:
        """Return the node of `value`; the names of its tensors start with `prefix`."""
        return self._encode(value, prefix, "", 0)

    def _encode(self, value: Any, name: str, path: str, depth: int) -> Any:
        # A limit instead of a set of visited objects, because one object can occur several times without a cycle.
        if depth > DEPTH:
            raise Unencodable(path[:80] + "...", f"is nested deeper than {DEPTH} levels; does it contain itself?")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name, path)
        kind = type(value)
        if kind is list:
            return self._all(value, name, path, depth)
        # By exact type here and below, because a subclass, such as a namedtuple, would be decoded as its base class.
        if kind is tuple or kind is torch.Size:
            return {"Size" if kind is torch.Size else "tuple": self._all(value, name, path, depth)}
        if kind is dict:
            return self._dict(value, name, path, depth)
        if kind is OrderedDict or kind is Counter:
            return {kind.__name__: self._dict(value, name, path, depth)}
        return _plain(value, path)

    def _all(self, values: Sequence[Any], name: str, path: str, depth: int) -> list[Any]:
        if depth < DEPTH and all(type(value) is int and value.bit_length() < 64 for value in values):
            return list(values)  # fast path for the state of a random generator, which has hundreds of integers
        return [
            self._encode(value, _join(name, index), f"{path}[{index}]", depth + 1) for index, value in enumerate(values)
        ]

    def _dict(self, value: dict[Any, Any], name: str, path: str, depth: int) -> Any:
        encoded = [
            (key, self._encode(item, _join(name, key), f"{path}[{key!r}]", depth + 1)) for key, item in value.items()
        ]
        if all(type(key) is str for key in value):
            return {"dict": dict(encoded)}
        return {"items": [[_key(key, path), node] for key, node in encoded]}

    def _tensor(self, value: torch.Tensor, name: str, path: str) -> Any:
        if self._gather is not None and type(value) not in _PLAIN and is_sharded(value):
            value = self._gather(value)
        if reason := _unstorable(value):
            raise Unencodable(path, reason)
        tag = "complex tensor" if value.is_complex() else "tensor"
        name = self._free(name)
        place = _place(value)
        if first := self._seen.get(place):
            self.aliases[name] = first
            return {tag: first}
        if value.numel():  # empty tensors can have the same address without being tied
            self._seen[place] = name
        self.tensors[name] = value.detach()
        return {tag: name}

    def _free(self, name: str) -> str:
        """Return `name`, or the first of `name#2`, `name#3`, … that is not in use."""
        name, count = name or "_", 1
        free = name
        # "__metadata__" is reserved by safetensors.
        while free in self.tensors or free in self.aliases or free == "__metadata__":
            count += 1
            free = f"{name}#{count}"
        return free


def decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of `node`, the inverse of :meth:`Encoder.encode`.

    Its tensors are the `tensors` themselves, so tied tensors become one object.
    """
    try:
        return _value(node, tensors)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _value(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_value(item, tensors) for item in node]
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError("a node is neither a value nor an object with one key")
    ((tag, content),) = node.items()
    try:
        return _decode(tag, content, tensors)
    # Malformed content makes base64, int(), torch.Size and view_as_complex raise various errors.
    except (TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {str(error)[:80]}"
        raise ValueError(f"a node {strict_json.shown(tag)} cannot be read: {why}") from None


def _decode(tag: str, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match tag:
        case "tensor":
            return tensors[content]
        case "complex tensor":
            return torch.view_as_complex(tensors[content])
        case "dict":
            return {key: _value(item, tensors) for key, item in content.items()}
        case "items":
            return _from_items([(_value(key, {}), _value(item, tensors)) for key, item in content])
        case "OrderedDict":
            return OrderedDict(_value(content, tensors))
        case "Counter":
            return Counter(_value(content, tensors))
        case "tuple":
            return tuple([_value(item, tensors) for item in content])
        case "Size":
            return torch.Size([_value(item, tensors) for item in content])
        case "bytes":
            return base64.b64decode(content, validate=True)
        case "float" if content in ("nan", "-nan", "inf", "-inf"):
            return float(content)
        case "int":
            return int(content, 16)
        case "dtype":
            return DTYPES[content]
    raise ValueError(f"a node has the unknown tag {tag[:40]!r}")


def _from_items(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of key-value `pairs`; raise if an attacker has chosen keys with colliding hashes."""
    collisions = max(Counter(hash(key) for key, _ in pairs).values(), default=0)
    if collisions > _SAME_HASH:
        raise ValueError(f"{collisions} of a dict's keys have the same hash")
    return strict_json.unique(pairs)


def _plain(value: Any, path: str) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar, such as a metric
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if value.bit_length() < 64 else {"int": hex(value)}
    if kind is float:
        sign = "-" if math.copysign(1, value) < 0 else ""  # str() drops the sign of nan
        return value if math.isfinite(value) else {"float": f"{sign}{abs(value)}"}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is torch.dtype and str(value) in DTYPES:
        return {"dtype": str(value)}
    raise Unencodable(path, f"is a {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, path: str) -> Any:
    """Return the node of a dict's key: a plain value, or a tuple of plain values."""
    if type(key) is tuple:
        return {"tuple": [_key(part, path) for part in key]}
    return _plain(key, f"{path} (key {key!r})")


def _join(name: str, key: Any) -> str:
    # The safetensors library cannot read lone surrogates, which Python uses for paths that are not UTF-8.
    text = str(key).encode("utf-8", "backslashreplace").decode("utf-8")
    return f"{name}.{text}" if name else text


def _unstorable(value: torch.Tensor) -> str | None:
    """Return why `value` cannot be stored, or None."""
    kind = type(value)
    if isinstance(value, UninitializedParameter | UninitializedBuffer):
        return "is an uninitialized parameter; run the module once first"
    if kind not in _PLAIN:
        return f"is a tensor of the class {kind.__module__}.{kind.__qualname__}"
    if value.layout is not torch.strided:
        return f"is a tensor with layout {value.layout}; only strided tensors can be stored"
    if value.is_meta:
        return "is a meta tensor, which has no data"
    if value.dtype not in STORABLE and not value.is_complex():
        return f"is a tensor of {value.dtype}"
    return None


def _place(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same elements of the same memory."""
    layout = value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
    return value.device, value.data_ptr(), *layout


STORABLE = frozenset(getattr(torch, name) for name in CODES)
DTYPES = {str(dtype): dtype for dtype in (*STORABLE, torch.complex64, torch.complex128)}
