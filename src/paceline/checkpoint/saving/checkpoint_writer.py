"""Writes one checkpoint into a temporary folder: the files, then the manifest that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.exchange.collected_states import Capture
from paceline.checkpoint.format import manifest, safetensors_file
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.manifest import RANK_ROLE, File, Manifest
from paceline.checkpoint.format.metadata import Notes
from paceline.checkpoint.format.shard_slices import slices_of
from paceline.checkpoint.storage import step_folders
from paceline.checkpoint.storage.step_folders import Storage
from paceline.core import strict_json
from paceline.core.telemetry.failpoints import strike


class Draft:
    """The checkpoint of `step` while it is being written. As a context manager it removes itself if the block raises.

    Raises:
        OSError: at once if the disk has no room for `size` bytes of tensors; from every method if a write fails.
    """

    def __init__(self, store: Storage, step: int, world_size: int, size: int) -> None:
        self._storage = store
        self._step = step
        self._world_size = world_size
        self._files: list[File] = []
        self._objects: dict[str, Any] = {}
        self._ranks: list[Mapping[str, Any]] = []
        self._folder = store.start(step, size)

    def add_shared(self, capture: Capture) -> None:
        """Write the tensors of an object that all ranks share, and keep its node for ``state.json``."""
        ((name, node),) = capture.nodes.items()
        self._objects[name] = node
        self._add_tensors(name, None, capture)

    def add_own(self, rank: int, capture: Capture) -> None:
        """Write the tensors of `rank`'s own states, and keep their nodes. Call it in the order of ranks."""
        self._ranks.append(capture.nodes)
        self._add_tensors(RANK_ROLE, rank, capture)

    def add_notes(self, given: Notes) -> None:
        """Write ``metadata.json``, unless it would be empty."""
        if given:
            size, digest = step_folders.write_file(self._folder / notes.NAME, [given.render()])
            self._files.append(File(notes.NAME, size, digest, notes.NAME, None, {}, {}))

    def commit(self) -> Path:
        """Write ``state.json`` and the manifest, and give the folder its name; then the checkpoint is durable.

        Raises:
            ValueError: if there are more plain values than ``state.json`` may hold.
        """
        state = {"step": self._step, "objects": self._objects, "ranks": self._ranks}
        size, digest = step_folders.write_file(self._folder / manifest.STATE, [strict_json.render(state)])
        self._files.append(File(manifest.STATE, size, digest, "state", None, {}, {}))
        found = Manifest(self._step, self._world_size, str(torch.__version__), _paceline_version(), tuple(self._files))
        step_folders.write_file(self._folder / manifest.NAME, [found.render()])
        return self._storage.commit(self._folder, self._step)

    def _add_tensors(self, role: str, rank: int | None, capture: Capture) -> None:
        if not capture.tensors:
            return
        path = f"{role}.safetensors" if rank is None else f"{role}-{rank:05d}.safetensors"
        size, digest = step_folders.write_file(
            self._folder / path, safetensors_file.pieces(capture.tensors, capture.aliases)
        )
        specs = safetensors_file.specs_of(capture.tensors)
        starts = {name: piece.start for name, piece in slices_of(capture.nodes, specs).items() if piece.start}
        self._files.append(File(path, size, digest, role, rank, specs, dict(capture.aliases), starts))
        strike("write")

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """Remove the written files as far as possible."""
        self._storage.abandon(self._folder)


def _paceline_version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"
