"""The manifest of a checkpoint: the list of its files, by which each of them is verified. No file's content is trusted.

``manifest.json`` is written last. Its ``sha256`` covers the rest of it, and its content has only one rendering, so any
change is detected. ``files`` lists every file with its size, SHA-256, role (a registered name, or ``state`` or
``rank``), rank (null for a file that all ranks share), and the shape and dtype of each tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from paceline.checkpoint import safetensors_file
from paceline.checkpoint.safetensors_file import Spec
from paceline.core import strict_json
from paceline.errors import NoCheckpoint

FORMAT_VERSION = 1
NAME = "manifest.json"
STATE = "state.json"
RANK_ROLE = "rank"
GENERATORS = "rng"
PIECE = 2**20  # bytes
Value = TypeVar("Value")
_FILE = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,200}")  # no slash or leading dot, so that the file is in the folder


class Damaged(Exception):
    """A checkpoint that cannot be used; the message is the reason."""


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
    # Sizes, checksums and specs are not checked here, because :func:`damages` compares them with the file.
    path = entry["path"]
    if not _FILE.fullmatch(path) or path == NAME:
        raise ValueError(f"it lists {path[:80]!r}, which is not a valid checkpoint file name")
    tensors = {name: Spec(tuple(spec["shape"]), spec["dtype"]) for name, spec in entry["tensors"].items()}
    return File(**{**entry, "tensors": tensors, "aliases": aliases.get(path, {})})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:  # the type itself, because True is an int
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def read_whole(folder: Path, step: int) -> Manifest:
    """Verify every file of the checkpoint `folder` by size and SHA-256; return its manifest."""
    listed = read_manifest(folder, step)
    for _, damage in damages(folder, listed):
        raise damage
    return listed


def damages(folder: Path, listed: Manifest, every_byte: bool = True) -> Iterator[tuple[File, Damaged]]:
    """Yield each file of the checkpoint `folder` that differs from the manifest `listed`, with the reason.

    Without `every_byte`, only sizes and lists of tensors are compared.
    """
    for file in listed.files:
        try:
            check_bytes(folder / file.path, file, every_byte)
            if file.path.endswith(".safetensors"):
                _check_tensors(folder / file.path, file)
        except Damaged as damage:
            yield file, damage


def read_manifest(folder: Path, step: int) -> Manifest:
    """Return the manifest of the checkpoint `folder`, without reading the listed files."""
    if folder.is_symlink() and not os.path.exists(folder):
        raise Damaged(f"it is a link to {os.readlink(folder)}, which cannot be opened")
    try:
        listed = parse(read_document(folder / NAME), folder)
    except NoCheckpoint:  # a newer format, which is not damage: the run must not go on from an older checkpoint
        raise
    except ValueError as error:
        raise Damaged(f"{NAME}: {error}") from None
    if listed.step != step:
        raise Damaged(f"{NAME} belongs to step {listed.step}, not to step {step}")
    return listed


def read_listed(folder: Path, file: File, parse: Callable[[bytes], Value]) -> Value:
    """Parse the JSON document that the manifest of the checkpoint `folder` lists as `file`."""
    check_bytes(folder / file.path, file)
    try:
        return parse(read_document(folder / file.path))
    except ValueError as error:
        raise Damaged(f"{file.path}: {error}") from None


def read_document(path: Path) -> bytes:
    """Return the bytes of a JSON document of limited size."""
    with _regular(path) as file:
        raw = file.read(strict_json.LIMIT + 1)
    if len(raw) > strict_json.LIMIT:
        raise Damaged(f"{path.name} has more than {strict_json.LIMIT} bytes")
    return raw


def check_bytes(path: Path, file: File, every_byte: bool = True) -> None:
    """Compare the content of `path`, or only its size, with the manifest's entry `file`."""
    with _regular(path) as content:
        size = os.fstat(content.fileno()).st_size
        if size != file.size:
            raise Damaged(f"{file.path} has {size} bytes, but the manifest says {strict_json.shown(file.size)}")
        digest = hashlib.sha256()
        while every_byte and (piece := content.read(PIECE)):
            digest.update(piece)
        if every_byte and digest.hexdigest() != file.sha256:
            raise Damaged(f"the content of {file.path} does not have the SHA-256 that the manifest states")


def _check_tensors(path: Path, file: File) -> None:
    try:
        specs = safetensors_file.read_specs(path)
    except (ValueError, OSError) as error:
        raise Damaged(f"{file.path}: {error}") from None
    if specs != dict(file.tensors):
        raise Damaged(f"{file.path} does not have the tensors that the manifest lists")


@contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    """Open the regular file `path`; raise for links, devices and pipes."""
    # O_NONBLOCK, because opening a pipe would wait for a writer. O_NOFOLLOW, because a link may lead anywhere.
    more = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | more)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damaged(f"{path.name} is not a regular file")
            yield file
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
