"""Safetensors files: hashed while they are written, and read with the safetensors library.

The format (https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the header as JSON with
dtype, shape and offsets per tensor, then the tensors' bytes, row-major and little-endian, without gaps.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.core import strict_json

PIECE = 4 * 2**20
"""Number of bytes hashed and written at a time."""
RUN = 32 * 2**20
"""Maximum total size in bytes of small tensors that are sent together."""
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
NAMES = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class Spec:
    """Shape of a stored tensor, and torch's name for its dtype (``"float32"``); complex tensors count as reals."""

    shape: tuple[int, ...]
    dtype: str

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Return an uninitialized tensor of this spec."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    @property
    def nbytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored form of `tensor`: contiguous on the CPU, complex values as pairs in an added last dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.cpu().contiguous()


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return the spec of the stored form of `tensor`."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype.is_complex:
        shape, dtype = (*shape, 2), dtype.to_real()
    return Spec(shape, str(dtype).removeprefix("torch."))


def runs(specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
    """Split `specs` into runs, each sent in one transfer: small tensors together, each large tensor separately."""
    all_runs: list[dict[str, Spec]] = []
    room = -1  # negative, so that the first tensor begins a run
    for name, spec in specs.items():
        room -= spec.nbytes
        if room < 0:
            all_runs.append({})
            room = RUN - spec.nbytes
        all_runs[-1][name] = spec
    return all_runs


def packed(run: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the concatenated bytes of one run's `tensors`; without `tensors`, as many uninitialized bytes."""
    if tensors is None:
        return torch.empty(sum(spec.nbytes for spec in run.values()), dtype=torch.uint8, device="cpu")
    views = [bytes_view(stored(tensors[name])) for name in run]
    return views[0] if len(views) == 1 else torch.cat(views)  # a large tensor is not copied


def unpacked(run: Mapping[str, Spec], moved: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in the result of :func:`packed`, on the CPU, in separate memory."""
    if len(run) == 1:  # a large tensor is not copied
        ((name, spec),) = run.items()
        return {name: moved.cpu().view(getattr(torch, spec.dtype)).reshape(spec.shape)}
    tensors = {name: spec.empty() for name, spec in run.items()}
    views = [bytes_view(tensor) for tensor in tensors.values()]
    for view, part in zip(views, moved.split([view.numel() for view in views]), strict=True):
        view.copy_(part)
    return tensors


def bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of the contiguous `tensor` as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def pieces(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with `tensors`; one tensor at a time is copied to the CPU.

    The file's metadata maps the `aliases` of tied tensors to the stored names, like ``safetensors.torch.save_model``.
    """
    specs = specs_of(tensors)
    # Wide dtypes first, so that every tensor is aligned when the file is mapped.
    names = sorted(specs, key=lambda name: (-getattr(torch, specs[name].dtype).itemsize, name))
    header: dict[str, object] = {"__metadata__": {**(aliases or {}), "format": "pt"}}
    offset = 0
    for name in names:
        spec = specs[name]
        end = offset + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = strict_json.render(header)
    text += b" " * (-len(text) % 8)  # trailing spaces are allowed, and align the first tensor
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from bytes_of(stored(tensors[name]))


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of `tensor` in pieces, without NumPy, which torch does not require."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return
    view = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))
    for start in range(0, size, PIECE):
        yield view[start : start + PIECE]


def read_specs(path: Path) -> dict[str, Spec]:
    """Return the names and specs of the tensors in the file `path`."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: Spec(tuple(part.get_shape()), NAMES[part.get_dtype()]) for name, part in slices.items()}


def read(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors in the file `path` by name, on the CPU."""
    with _opened(path) as file:
        # Cloned: the library maps the file, and a tensor must outlive the pruning of its checkpoint.
        return {name: file.get_tensor(name).clone() for name in names}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file `path` with the safetensors library, which checks the header."""
    try:
        # The library refuses a path that is not UTF-8.
        with open(path, "rb") as opened, safe_open(f"/dev/fd/{opened.fileno()}", framework="pt", device="cpu") as file:
            yield file
    # KeyError: a dtype that torch does not have. TypeError: a dimension that is too large for torch.
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a safetensors file ({str(error).partition(chr(10))[0]})") from None
    except RuntimeError as error:  # torch could not map the file, for example because it has just been deleted
        raise OSError(str(error)) from None
