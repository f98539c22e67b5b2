"""Safetensors files: written as a stream, so that bytes are hashed as they pass; read by the safetensors library.

Their headers are checked here before the library reads them.

The format (https://github.com/huggingface/safetensors): 8 bytes length of the header, the header as JSON with
dtype, shape and offsets per tensor, then the tensors' bytes, row-major and little-endian, without holes.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.core import strict_json

PIECE = 4 * 2**20  # bytes handed to the hash and to the file at a time
RUN = 32 * 2**20  # bytes of small tensors that travel between ranks at once
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
    """The shape of a stored tensor and torch's name of its dtype (``"float32"``); complex tensors count as reals."""

    shape: tuple[int, ...]
    dtype: str

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """Return a tensor of this spec with undefined values."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored form of `tensor`: contiguous on the CPU, complex values as pairs in a last dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.cpu().contiguous()


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return the spec under which `tensor` is stored."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if dtype.is_complex:
        shape, dtype = (*shape, 2), dtype.to_real()
    return Spec(shape, str(dtype).removeprefix("torch."))


def bytes_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes `tensors` take when they are stored."""
    return sum(spec_of(tensor).nbytes for tensor in tensors)


def runs(specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
    """Return `specs` cut into runs that travel at once: small tensors together, a large one alone."""
    found: list[dict[str, Spec]] = []
    # Below zero, so that the first tensor opens a run, however small it is.
    room = -1
    for name, spec in specs.items():
        room -= spec.nbytes
        if room < 0:
            found.append({})
            room = RUN - spec.nbytes
        found[-1][name] = spec
    return found


def packed(run: Mapping[str, Spec], tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the bytes of the `tensors` of one run, one after the other; as many undefined bytes without `tensors`."""
    if tensors is None:
        return torch.empty(sum(spec.nbytes for spec in run.values()), dtype=torch.uint8)
    views = [_bytes_view(stored(tensors[name])) for name in run]
    return views[0] if len(views) == 1 else torch.cat(views)  # a large tensor is not copied


def unpacked(run: Mapping[str, Spec], moved: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors whose bytes :func:`packed` laid out, on the CPU, each in memory of its own."""
    if len(run) == 1:  # a large one, which is not copied
        ((name, spec),) = run.items()
        return {name: moved.cpu().view(getattr(torch, spec.dtype)).reshape(spec.shape)}
    found = {name: spec.empty() for name, spec in run.items()}
    views = [_bytes_view(tensor) for tensor in found.values()]
    for view, part in zip(views, moved.split([view.numel() for view in views]), strict=True):
        view.copy_(part)
    return found


def _bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of the contiguous `tensor` as bytes, so that any dtype can be sent."""
    return tensor.reshape(-1).view(torch.uint8)


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Return the specs under which `tensors` are stored, by name."""
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def pieces(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with `tensors`; one tensor at a time is copied to the CPU.

    The metadata of the file map each of `aliases`, further names of tensors that are tied, to the name that is
    stored, as ``safetensors.torch.save_model`` does.
    """
    specs = specs_of(tensors)
    # Wide dtypes first, like the library, so that every tensor is aligned when the file is mapped.
    names = sorted(specs, key=lambda name: (-getattr(torch, specs[name].dtype).itemsize, name))
    header: dict[str, object] = {"__metadata__": {**(aliases or {}), "format": "pt"}}
    offset = 0
    for name in names:
        spec = specs[name]
        end = offset + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = strict_json.render(header)
    text += b" " * (-len(text) % 8)  # spaces are allowed at its end, and align the first tensor
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from bytes_of(stored(tensors[name]))


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Return the memory of `tensor`, without NumPy, which torch does not require."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return
    view = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()))
    for start in range(0, size, PIECE):
        yield view[start : start + PIECE]


def read_specs(path: Path) -> dict[str, Spec]:
    """Return names and specs of the tensors in the file `path`.

    The header is read here because the library would allocate any amount of memory that the header claims.
    """
    return {name: spec for name, (spec, _) in read_places(path).items()}


def read_places(path: Path) -> dict[str, tuple[Spec, int]]:
    """Return names and specs of the tensors in the file `path`, each with the byte at which it begins."""
    header, data = _read_header(path)
    start = path.stat().st_size - data
    header.pop("__metadata__", None)
    try:
        found = {name: _entry_in(entry) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no safetensors file ({type(error).__name__}: {str(error)[:80]})") from None
    end = 0
    for spec, offsets in sorted(found.values(), key=lambda entry: entry[1]):
        if offsets != (end, end + spec.nbytes):
            raise ValueError(f"it is no safetensors file (a tensor's bytes are at {offsets}, not from {end} on)")
        end = offsets[1]
    if end != data:
        raise ValueError(f"it is no safetensors file (it has {data} bytes for {end} bytes of tensors)")
    return {name: (spec, start + begin) for name, (spec, (begin, _)) in found.items()}


def read_aliases(path: Path, names: Container[str]) -> dict[str, str]:
    """Return further names of tied tensors in the file `path`, each with the one of `names` that is stored."""
    metadata = _read_header(path)[0].get("__metadata__")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {
        alias: target
        for alias, target in pairs
        if isinstance(target, str) and target in names and alias not in names and alias != "format"
    }


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of the file `path`, and the number of bytes after it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if size < 0 or length > min(size, strict_json.LIMIT):
            raise ValueError(f"it is no safetensors file (its header would have {length} bytes)")
        raw = file.read(length)
    try:
        header = strict_json.parse(raw)
    except ValueError as error:
        raise ValueError(f"it is no safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("it is no safetensors file (its header is no JSON object)")
    return header, size - length


def _entry_in(entry: Mapping[str, Any]) -> tuple[Spec, tuple[int, int]]:
    """Return a header's entry: spec and offsets of the tensor."""
    begin, end = entry["data_offsets"]
    numbers = [*entry["shape"], begin, end]
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError("an entry has numbers that are no counts")
    if entry["dtype"] not in NAMES:
        raise ValueError(f"a tensor has the dtype {strict_json.shown(entry['dtype'])}")
    return Spec(tuple(entry["shape"]), NAMES[entry["dtype"]]), (begin, end)


def read(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors in the file `path` by name, on the CPU."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Cloned: the library maps the file, and a tensor must outlive the pruning of its checkpoint.
            return {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(f"it is no safetensors file ({error})") from None
