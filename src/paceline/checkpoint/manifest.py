"""The manifest of a checkpoint: the list of its files, used to verify each of them.

``manifest.json`` is written last. Its ``sha256`` covers the rest of it, and its content has only one rendering, so any
change is detected. ``files`` lists every file with its size, SHA-256, role (a registered name, or ``state`` or
``rank``), rank (null for a file that all ranks share), and the shape and dtype of each tensor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.safetensors_file import Spec
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
        body = {"format_version": FORMAT_VERSION, **asdict(self)}
        aliases = {file["path"]: file.pop("aliases") for file in body["files"]}
        body["aliases"] = {path: names for path, names in aliases.items() if names}
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
        files = tuple(_file_in(entry, body["aliases"]) for entry in body["files"])
        counts = _count(body["step"]), _count(body["world_size"])
        manifest = Manifest(*counts, body["torch_version"], body["paceline_version"], files)
        # Rendered again instead of hashed, so that no other text is accepted for the same content.
        if manifest.render() != raw:
            raise ValueError("its own checksum does not match its content")
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"an entry is missing or malformed ({type(error).__name__}: {str(error)[:80]})") from None
    if len({file.path for file in files}) < len(files):
        raise ValueError("it lists a file twice")
    if manifest.file("state") is None:
        raise ValueError(f"it does not list {STATE}")
    return manifest


def _file_in(entry: Any, aliases: Any) -> File:
    # Sizes, checksums and specs are not checked here, because verify compares them with the file.
    path = entry["path"]
    if not _FILE.fullmatch(path) or path == NAME:
        raise ValueError(f"it lists {path[:80]!r}, which is not a valid checkpoint file name")
    tensors = {name: Spec(tuple(spec["shape"]), spec["dtype"]) for name, spec in entry["tensors"].items()}
    return File(**{**entry, "tensors": tensors, "aliases": aliases.get(path, {})})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:  # the type itself, because True is an int
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value
