"""Verifies a checkpoint folder, and reads its documents. The content of the files is not trusted."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from paceline.checkpoint import manifest, safetensors_file
from paceline.checkpoint.manifest import File, Manifest
from paceline.core import strict_json
from paceline.errors import NoCheckpoint

Value = TypeVar("Value")
PIECE = 2**20  # bytes


class Damaged(Exception):
    """A checkpoint that cannot be used; the message is the reason."""


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
        listed = manifest.parse(read_document(folder / manifest.NAME), folder)
    except NoCheckpoint:  # a newer format, which is not damage: the run must not go on from an older checkpoint
        raise
    except ValueError as error:
        raise Damaged(f"{manifest.NAME}: {error}") from None
    if listed.step != step:
        raise Damaged(f"{manifest.NAME} belongs to step {listed.step}, not to step {step}")
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
