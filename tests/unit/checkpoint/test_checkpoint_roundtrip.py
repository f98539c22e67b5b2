"""Round trips: state is encoded and restored bit for bit, and what cannot be saved or restored is refused by name."""

from __future__ import annotations

import copy
import enum
import math
import threading
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from drawn import draws
from insides import STORABLE, Encoder, Unencodable, decode, safetensors_file, step_folders, strict_json
from paceline.checkpoint import Checkpointer
from paceline.errors import CheckpointMismatch, UsageError


class Tied(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(words)))


class Holder:
    """Holds any state as is."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def opened(folder: Path, objects: dict[str, Any], **options: Any) -> Checkpointer:
    """Return a Checkpointer with registered `objects`."""
    checkpointer = Checkpointer(folder, **options)
    for name, entry in objects.items():
        checkpointer.register(name, entry)
    return checkpointer


def save(folder: Path, step: int = 1, keep: int = 3, **objects: Any) -> Path:
    """Save `objects` and return the folder of the step."""
    with opened(folder, objects, keep=keep) as checkpointer:
        return checkpointer.save(step)


def test_a_wrapped_or_compiled_module_is_saved_without_prefix(tmp_path: Path) -> None:
    model = nn.DataParallel(nn.Linear(2, 2))
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    path = save(tmp_path, model=model, compiled=compiled)
    assert set(load_file(path / "model.safetensors")) == {"weight", "bias"}
    assert set(load_file(path / "compiled.safetensors")) == {"weight", "bias"}


WRONG_MODELS = [
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6)), r"'1.weight'.*\(5, 4\).*step 4.*\(6, 4\)"),
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).double()), r"'1.weight'.*torch.float32.*torch.float64"),
    (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.PReLU()), r"'2.weight' of 'model' is not in"),
    (nn.Sequential(nn.Linear(3, 4)), r"'1.weight' of 'model' is in the checkpoint of step 4 but not in this run"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_MODELS)
def test_a_different_model_is_refused_by_parameter_name(tmp_path: Path, wrong: nn.Module, message: str) -> None:
    save(tmp_path, 4, other=Holder({"a": 1}), model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    before = copy.deepcopy(wrong.state_dict())
    other = Holder({"a": 2})
    checkpointer = opened(tmp_path, {"other": other, "model": wrong})
    with checkpointer, pytest.raises(CheckpointMismatch, match=message):
        checkpointer.restore()
    assert other.state == {"a": 2}
    assert same(wrong.state_dict(), before)


def test_an_unregistered_saved_object_is_named(tmp_path: Path) -> None:
    save(tmp_path, 4, model=nn.Linear(2, 2), schedule=Holder({}))
    message = r"'schedule' is in the checkpoint of step \d+ but not registered"
    with (
        opened(tmp_path, {"model": nn.Linear(2, 2)}) as checkpointer,
        pytest.raises(CheckpointMismatch, match=message),
    ):
        checkpointer.restore()


def test_unsupported_state_is_refused_at_registration(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match=r"scheduler\.state_dict\(\)\['lr_lambdas'\]\[0\] is a builtins.func"):
            checkpointer.register("scheduler", Holder({"lr_lambdas": [lambda step: step]}))
        checkpointer.register("scheduler", Holder({}))


@pytest.mark.parametrize("name", ["", "Model", "a-b", "../x", "state", "rank", "rng", 3])
def test_a_malformed_or_reserved_name_is_refused(tmp_path: Path, name: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="cannot be the name"):
        checkpointer.register(name, Holder({}))


class WrappingOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer as torch's PostLocalSGDOptimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def test_an_optimizer_wrapper_that_hides_its_steps_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(UsageError, match="register the optimizer inside it"):
            checkpointer.register("optimizer", WrappingOptimizer(inner))
        checkpointer.register("optimizer", inner)


def test_register_refuses_duplicate_names_and_stateless_objects(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.register("model", Holder({}))
        with pytest.raises(UsageError, match="already"):
            checkpointer.register("model", Holder({}))
        with pytest.raises(UsageError, match="a list, must have the methods"):
            checkpointer.register("list", [])  # type: ignore[type-var]


def test_a_closed_checkpointer_refuses_to_work(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        checkpointer.save(1)


# -- encoding ----------------------------------------------------------------------------------------------------------


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
@example(value=[math.nan, -math.nan, math.inf, -math.inf, -0.0])
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
    specs = {name: safetensors_file.spec_of(tensor) for name, tensor in encoder.tensors.items()}
    assert safetensors_file.read_specs(path) == specs
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
