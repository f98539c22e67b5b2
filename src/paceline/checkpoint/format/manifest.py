"""The manifest of a checkpoint: the list of its files, used to verify each of them.

``manifest.json`` is written last. Its ``sha256`` covers the rest of it, and its content has only one rendering, so any
change is detected. ``files`` lists every file with its size, SHA-256, role (a registered name, or ``state`` or
``rank``), rank (null for a file that all ranks share), and the shape and dtype of each tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.format.safetensors_file import CODES, Spec
from paceline.core import strict_json
from paceline.errors import NoCheckpoint

FORMAT_VERSION = 1
NAME = "manifest.json"
STATE = "state.json"
RANK_ROLE = "rank"
GENERATORS = "rng"
_FILE = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,200}")  # no slash or leading dot, so that the file is in the folder


@dataclass(frozen=True)
class File:
    """One file of a checkpoint; ``size`` in bytes. ``tensors`` is empty unless it is a safetensors file."""

    path: str
    size: int
    sha256: str
    role: str
    rank: int | None = None
    tensors: Mapping[str, Spec] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    world_size: int
    torch_version: str
    paceline_version: str
    files: tuple[File, ...]

    def file(self, role: str, rank: int | None = None) -> File | None:
        """Return the file with this `role` and `rank`, or None."""
        return next((file for file in self.files if (file.role, file.rank) == (role, rank)), None)

    def render(self) -> bytes:
        """Return the manifest as the bytes of ``manifest.json``."""
        body: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "torch_version": self.torch_version,
            "paceline_version": self.paceline_version,
            "files": [_file_out(file) for file in self.files],
            "aliases": {file.path: dict(file.aliases) for file in self.files if file.aliases},
        }
        digest = hashlib.sha256(strict_json.render(body)).hexdigest()
        return strict_json.render({**body, "sha256": digest}, indent=1) + b"\n"


def parse(raw: bytes, folder: Path) -> Manifest:
    """Parse the bytes of the ``manifest.json`` in the checkpoint `folder`."""
    body = strict_json.parse(raw)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    version = body.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise NoCheckpoint(
            f"the checkpoint {folder} has format {version}, but this version of Paceline reads formats up to "
            f"{FORMAT_VERSION}; update Paceline, or use another folder"
        )
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version is {strict_json.shown(version)}, not {FORMAT_VERSION}")
    try:
        aliases = body["aliases"]
        files = tuple(_file_in(entry, aliases) for entry in body["files"])
        manifest = Manifest(
            step=_count(body["step"]),
            world_size=_count(body["world_size"]),
            torch_version=_text(body["torch_version"]),
            paceline_version=_text(body["paceline_version"]),
            files=files,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is missing or malformed ({type(error).__name__}: {str(error)[:80]})") from None
    if len({file.path for file in files}) < len(files):
        raise ValueError("it lists a file twice")
    if manifest.file("state") is None:
        raise ValueError(f"it does not list {STATE}")
    # Rendered again instead of hashed, so that no other text is accepted for the same content.
    if manifest.render() != raw:
        raise ValueError("its own checksum does not match its content")
    return manifest


def _file_out(file: File) -> dict[str, Any]:
    tensors = {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in file.tensors.items()}
    return {
        "path": file.path,
        "size": file.size,
        "sha256": file.sha256,
        "role": file.role,
        "rank": file.rank,
        "tensors": tensors,
    }


def _file_in(entry: Any, aliases: Any) -> File:
    path = _text(entry["path"])
    if not _FILE.fullmatch(path) or path == NAME:
        raise ValueError(f"it lists {path[:80]!r}, which is not a valid checkpoint file name")
    tensors = {name: _spec_in(tensor) for name, tensor in entry["tensors"].items()}
    targets = {alias: _text(target) for alias, target in aliases.get(path, {}).items()}
    if dangling := [target for target in targets.values() if target not in tensors]:
        raise ValueError(f"an alias in {path!r} refers to {strict_json.shown(dangling[0])}, which is missing")
    return File(
        path=path,
        size=_count(entry["size"]),
        sha256=_text(entry["sha256"]),
        role=_text(entry["role"]),
        rank=None if entry["rank"] is None else _count(entry["rank"]),
        tensors=tensors,
        aliases=targets,
    )


def _spec_in(entry: Any) -> Spec:
    shape, dtype = tuple(_count(size) for size in entry["shape"]), _text(entry["dtype"])
    if dtype not in CODES:
        raise ValueError(f"{dtype[:40]!r} is not a dtype that checkpoints can store")
    return Spec(shape, dtype)


def _count(value: Any) -> int:
    # Check the type itself, because True is an int. Sizes in torch are below 2**63.
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:40]!r} is not a string")
    return value
