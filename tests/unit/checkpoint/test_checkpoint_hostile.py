"""What a stranger may have written is read in linear time and bounded memory, or refused by name.

A manifest is parsed before any checksum can vouch for it, and checksums can be forged. A key that occurs twice was
searched for in quadratic time, and 64 MiB of ``[],[],…`` took 1.6 GiB.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.format import safetensors_file, state_codec
from paceline.core import strict_json


def seconds(function: Any, *arguments: Any) -> float:
    start = time.process_time()
    with pytest.raises(ValueError):
        function(*arguments)
    return time.process_time() - start


def test_a_key_that_occurs_twice_among_many_is_found_in_linear_time() -> None:
    keys = ",".join(f'"key{index}":0' for index in range(60_000))
    last = f'{{{keys},"key59999":0}}'.encode()
    assert seconds(strict_json.parse, last) < 20 * seconds(strict_json.parse, f"{{{keys}}}x".encode()) + 0.1


AMPLIFIED = {
    "lists": b"[" + b"[]," * 2_700_000 + b"0]",
    "dicts": b"[" + b'{"":0},' * 1_100_000 + b"0]",
    "entries": b"{" + b'"":0,' * 1_600_000 + b'"":0}',
    "a number": b"1" * 2**23,
    "a fraction": b"0." + b"1" * (2**23 - 2),
}


@pytest.mark.parametrize("raw", AMPLIFIED.values(), ids=AMPLIFIED)
def test_json_that_takes_many_times_its_size_in_memory_is_refused_before_it_does(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"up to \d+ values|number of \d+ digits"):
        strict_json.parse(raw, limit=2**23)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(raw)


def header(tensors: Any, data: int = 0, path: Path = Path()) -> Path:
    raw = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


def entry(begin: Any, end: Any, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, int, str]] = {
    "overlap": ({"a": entry(0, 4), "b": entry(0, 4)}, 8, "not from 4 on"),
    "hole": ({"a": entry(4, 8)}, 8, "not from 0 on"),
    "more than the file": ({"a": entry(0, 4)}, 3, "3 bytes for 4"),
    "less than the file": ({"a": entry(0, 4)}, 5, "5 bytes for 4"),
    "other size": ({"a": entry(0, 4, (2,))}, 4, "not from 0 on"),
    "huge": ({"a": entry(0, 2**62, (2**60,))}, 4, "bytes for"),
    "negative": ({"a": entry(0, 4, (-1, -1))}, 4, "no counts"),
    "true": ({"a": entry(0, 4, (True,))}, 4, "no counts"),
    "dtype": ({"a": entry(0, 4, dtype="F4")}, 4, "'F4'"),
    "twice": (b'{"a":1,"a":1}', 0, "'a' occurs twice"),
    "list": ([], 0, "no JSON object"),
    "deep": (b"[" * 99_999, 0, "deeply"),
    "many": (b"{" + b'"":[],' * 2_000_000 + b"}", 0, "values"),
}


@pytest.mark.parametrize(("tensors", "data", "why"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, tensors: Any, data: int, why: str) -> None:
    with pytest.raises(ValueError, match=f"no safetensors file .*{why}"):
        safetensors_file.read_specs(header(tensors, data, tmp_path / "x.safetensors"))


def test_keys_that_are_made_to_collide_are_refused() -> None:
    # Whole numbers are hashed modulo 2**61 - 1, without a secret: 100,000 equal hashes took minutes.
    node = {"items": [[{"int": hex(index * (2**61 - 1))}, 0] for index in range(2000)]}
    with pytest.raises(ValueError, match="2000 of a dict's keys have the same hash"):
        state_codec.decode(node, {})
    assert state_codec.decode({"items": [[-1, 0], [-2, 1]]}, {}) == {-1: 0, -2: 1}
    with pytest.raises(ValueError, match="1 occurs twice"):
        state_codec.decode({"items": [[1, 0], [1, 1]]}, {})
