"""Encoding round-trips bit for bit; a value that cannot be encoded is named by its path."""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from drawn import draws
from paceline.checkpoint import safetensors_file, step_folders
from paceline.checkpoint.state_codec import STORABLE, Encoder, Unencodable, decode
from paceline.core import strict_json


def through_json(value: Any) -> Any:
    encoder = Encoder()
    raw = strict_json.render(encoder.encode(value))
    stored = {name: safetensors_file.stored(tensor) for name, tensor in encoder.tensors.items()}
    return decode(strict_json.parse(raw), stored)


def same(left: Any, right: Any) -> bool:
    """Whether both values are bit-equal, including types and key order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bytes(tensorfile_bytes(left)) == bytes(tensorfile_bytes(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and (left == right or left != left)
    return bool(left == right)


def tensorfile_bytes(tensor: torch.Tensor) -> bytes:
    return b"".join(bytes(piece) for piece in safetensors_file.bytes_of(safetensors_file.stored(tensor)))


def tensors() -> st.SearchStrategy[torch.Tensor]:
    dtypes = [*sorted(STORABLE, key=str), torch.complex64, torch.complex128]
    shapes = st.lists(st.integers(0, 3), max_size=3)

    def make(shape: list[int], dtype: torch.dtype, seed: int, transposed: bool) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
        return tensor.T if transposed and tensor.ndim == 2 else tensor

    return st.builds(make, shapes, st.sampled_from(dtypes), st.integers(0, 99), st.booleans())


text = st.text(st.characters(exclude_categories=[]), max_size=5)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    text,
    st.binary(max_size=5),
    st.sampled_from([torch.float32, torch.Size([2, 3]), Counter({3: 1})]),
    tensors(),
)
keys = st.one_of(text, st.integers(), st.none(), st.tuples(text, st.integers()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(text, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(text, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


@draws(80)
@given(trees)
def test_nested_values_round_trip(value: Any) -> None:
    assert same(through_json(value), value)


@draws(40)
@given(found=st.dictionaries(text, tensors(), max_size=4))
@example(found={"a\udcff": torch.ones(1)})  # a file name that is not UTF-8
def test_safetensors_reads_our_files(tmp_path_factory: pytest.TempPathFactory, found: dict[str, torch.Tensor]) -> None:
    path = tmp_path_factory.mktemp("file") / "some.safetensors"
    encoder = Encoder()
    encoder.encode(found)
    step_folders.write_file(path, safetensors_file.pieces(encoder.tensors))
    loaded = load_file(path)
    assert set(loaded) == set(encoder.tensors)
    for name, tensor in encoder.tensors.items():
        assert same(loaded[name], safetensors_file.stored(tensor))
    assert safetensors_file.read_specs(path) == {
        name: safetensors_file.spec_of(tensor) for name, tensor in encoder.tensors.items()
    }
    assert all(same(safetensors_file.read(path, loaded)[name], loaded[name]) for name in loaded)


def test_tensors_with_equal_paths_do_not_collide() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "": torch.ones(3)}
    assert same(through_json(value), value)


def test_tied_tensors_are_stored_once_and_restored_tied() -> None:
    weight = torch.ones(2, 3)
    encoder = Encoder()
    node = encoder.encode({"embed": weight, "head": weight, "transposed": weight.T, "part": weight[0]})
    assert set(encoder.tensors) == {"embed", "transposed", "part"}
    assert encoder.aliases == {"head": "embed"}
    back = decode(node, encoder.tensors)
    assert back["embed"] is back["head"]


def test_numpy_scalars_are_restored_as_numbers() -> None:
    back = through_json([numpy.float64(0.1), numpy.int64(3), numpy.bool_(True)])
    assert same(back, [0.1, 3, True])


class Colour(enum.IntEnum):
    RED = 1


class Odd(torch.Tensor):
    pass


UNENCODABLE = [
    ({"lr_lambdas": [lambda step: step]}, "['lr_lambdas'][0]", "builtins.function"),
    ([1, {2, 3}], "[1]", "builtins.set"),
    ({"a": defaultdict(int)}, "['a']", "defaultdict"),
    ({"lock": threading.Lock()}, "['lock']", "lock"),
    ({"c": Colour.RED}, "['c']", "Colour"),
    ({frozenset(): 1}, "key frozenset()", "frozenset"),
    ({"x": numpy.zeros(2)}, "['x']", "numpy.ndarray"),
    ({"x": torch.eye(2).to_sparse()}, "['x']", "sparse"),
    ({"x": torch.empty(2, device="meta")}, "['x']", "meta"),
    ({"x": torch.ones(2).as_subclass(Odd)}, "['x']", "Odd"),
    ({"x": torch.nn.LazyLinear(2).weight}, "['x']", "uninitialized"),
]


@pytest.mark.parametrize(("value", "path", "why"), UNENCODABLE, ids=[row[2] for row in UNENCODABLE])
def test_an_unsupported_value_is_named_with_its_path(value: Any, path: str, why: str) -> None:
    with pytest.raises(Unencodable) as caught:
        Encoder().encode(value)
    assert path in caught.value.path
    assert why in caught.value.reason


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unencodable, match="contain itself"):
        Encoder().encode(value)
