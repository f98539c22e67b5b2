"""Verifies a checkpoint folder. It reads every byte, in pieces, and trusts nothing that it reads."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline import documents
from paceline.checkpoint import manifest, tensorfile
from paceline.checkpoint.manifest import File, Manifest

PIECE = 2**20  # bytes


class Damaged(Exception):
    """A checkpoint that cannot be used; the message is the reason."""


def read_whole(folder: Path, step: int) -> Manifest:
    """Verify every file of the checkpoint `folder` by size and SHA-256; return its manifest.

    Raises:
        Damaged: if anything is missing, altered, of another step or malformed.
    """
    found = read_manifest(folder, step)
    for file in found.files:
        check_bytes(folder / file.path, file)
    for file in found.files:
        if file.path.endswith(".safetensors"):
            _check_tensors(folder / file.path, file)
    return found


def read_manifest(folder: Path, step: int) -> Manifest:
    """Return the manifest of the checkpoint `folder`; the files that it lists are not read.

    Raises:
        Damaged: if it is missing, altered, of another step or malformed.
    """
    try:
        found = manifest.parse(read_document(folder / manifest.NAME))
    except ValueError as error:
        raise Damaged(f"{manifest.NAME}: {error}") from None
    if found.step != step:
        raise Damaged(f"{manifest.NAME} is that of step {found.step}, not of step {step}")
    return found


def read_document(path: Path) -> bytes:
    """Return the bytes of a JSON document, refusing to read more than the permitted size.

    Raises:
        Damaged: if it is not there, no regular file, or too large.
    """
    with _regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > documents.LIMIT:
            raise Damaged(f"{path.name} has {size} bytes, the limit is {documents.LIMIT}")
        raw = bytearray()
        while piece := os.read(descriptor, PIECE):
            raw += piece
            if len(raw) > documents.LIMIT:
                raise Damaged(f"{path.name} grew while it was read")
        return bytes(raw)


def check_bytes(path: Path, file: File) -> None:
    """Compare the content of `path` with the manifest's entry `file`.

    Raises:
        Damaged: if it is missing, or has another size or SHA-256.
    """
    with _regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size != file.size:
            raise Damaged(f"{file.path} has {size} bytes, the manifest says {file.size}")
        digest = hashlib.sha256()
        while piece := os.read(descriptor, PIECE):
            digest.update(piece)
        if digest.hexdigest() != file.sha256:
            raise Damaged(f"the content of {file.path} does not have the SHA-256 that the manifest states")


def _check_tensors(path: Path, file: File) -> None:
    try:
        specs = tensorfile.read_specs(path)
    except (ValueError, OSError) as error:
        raise Damaged(f"{file.path}: {error}") from None
    if specs != dict(file.tensors):
        raise Damaged(f"{file.path} holds other tensors than the manifest says")


@contextmanager
def _regular(path: Path) -> Iterator[int]:
    """Return a descriptor for reading the regular file `path`; refuse links, devices and pipes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Damaged(f"{path.name} is no regular file")
        yield descriptor
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
    finally:
        os.close(descriptor)
