"""Writes checkpoints on rank 0: the files into a temporary folder, then the manifest that lists them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.format import manifest, safetensors_file
from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.manifest import RANK_ROLE, File, Manifest
from paceline.checkpoint.format.metadata import Keep
from paceline.checkpoint.saving.save import Part, Save
from paceline.checkpoint.saving.staging import Staging
from paceline.checkpoint.storage import step_folders
from paceline.checkpoint.storage.step_folders import Storage, reason
from paceline.core import strict_json
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointError, CheckpointWarning


def write(store: Storage, order: Save, draft: Path, states: Iterable[Part]) -> Path:
    """Write all files into the temporary folder `draft`, the manifest last, and rename it to make it durable."""
    files: list[File] = []

    def add(path: str, role: str, content: Iterable[bytes | memoryview], **about: Any) -> None:
        size, digest = step_folders.write_file(draft / path, content)
        files.append(File(path, size, digest, role, **about))

    try:
        objects: dict[str, Any] = {}
        ranks: list[Mapping[str, Any]] = []
        for rank, capture in states:
            if rank is None:
                objects |= capture.nodes
                (role,) = capture.nodes
                path = f"{role}.safetensors"
            else:
                ranks.append(capture.nodes)
                role, path = RANK_ROLE, f"{RANK_ROLE}-{rank:05d}.safetensors"
            if capture.tensors:
                specs = safetensors_file.specs_of(capture.tensors)
                content = safetensors_file.pieces(capture.tensors, capture.aliases)
                add(path, role, content, rank=rank, tensors=specs, aliases=dict(capture.aliases))
                strike("write")
        if order.notes:
            add(notes.NAME, notes.NAME, [order.notes.render()])
        state = {"step": order.step, "objects": objects, "ranks": ranks}
        add(manifest.STATE, "state", [strict_json.render(state)])
        listed = Manifest(order.step, order.world_size, str(torch.__version__), _paceline_version(), tuple(files))
        step_folders.write_file(draft / manifest.NAME, [listed.render()])
        return store.commit(draft, order.step)
    except BaseException:
        store.abandon(draft)
        raise


class Writer:
    """Writes one save at a time: while the caller waits or, `in_background`, in a thread.

        save()  ──► copy rank 0's states into the staging memory, fetch the other ranks' ──► returns
                                         └──► thread: write, fsync, rename, prune ──► finish() waits, raises its error

    The thread uses no collectives and no live tensors. The interpreter waits for it at exit. Decision 0030 explains the
    design.
    """

    def __init__(self, store: Storage, keep: Keep, in_background: bool) -> None:
        self.in_background = in_background
        self._store = store
        self._keep = keep
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failed: list[CheckpointError] = []
        """The error of the latest save until :meth:`finish` raises it; a list, because the finalizer shares it."""
        weakref.finalize(self, _warn_about, self._failed)

    def save(self, order: Save, states: Iterable[Part]) -> Path:
        """Write `states`, then prune old checkpoints.

        The save is durable when this returns or, in the background, when :meth:`finish` has returned.
        """
        assert self._thread is None, "call finish() before the next save"
        with self._explained(order):
            draft = self._store.start(order.step, order.size)  # first, because it raises if the disk is too full
            if not self.in_background:
                return self._write(order, draft, states)
            try:
                copies = self._copied(list(states))
                thread = threading.Thread(target=self._run, args=(order, draft, copies), name="paceline-checkpoint")
                thread.start()
            except BaseException as error:
                self._store.abandon(draft)
                if isinstance(error, RuntimeError):  # no thread can be started
                    raise OSError(str(error)) from error
                raise
        self._thread = thread
        return self._store.path(order.step)

    def join(self) -> None:
        """Wait until no save is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until the latest save is durable; raise its error, once."""
        self.join()
        if self._failed:
            raise self._failed.pop()

    def close(self) -> None:
        """Wait for a background save, warn about its error if :meth:`join` did not raise it, and release the memory."""
        self.join()
        self._staging = Staging()
        _warn_about(self._failed)
        self._failed.clear()

    def _copied(self, states: list[Part]) -> list[Part]:
        """Return `states` with copies of rank 0's states. States from other ranks need no copy: they do not change."""
        local = [part for part in states if not part[0]]
        copies = self._staging.copies([capture for _, capture in local])
        return [(rank, copy) for (rank, _), copy in zip(local, copies, strict=True)] + states[len(local) :]

    def _run(self, order: Save, draft: Path, states: list[Part]) -> None:
        try:
            self._write(order, draft, states)
        except BaseException as error:  # finish() raises any error
            unsaved = self._unsaved(order, error)
            unsaved.__cause__ = error
            self._failed.append(unsaved)

    def _write(self, order: Save, draft: Path, states: Iterable[Part]) -> Path:
        path = write(self._store, order, draft, states)
        # Delete old checkpoints only after this one is durable.
        self._store.prune(order.step, self._keep)
        self._store.warn_of_later(order.step)
        return path

    @contextmanager
    def _explained(self, order: Save) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, MemoryError) as error:
            raise self._unsaved(order, error) from error

    def _unsaved(self, order: Save, error: BaseException) -> CheckpointError:
        why = reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        return CheckpointError(
            f"rank 0 could not save step {order.step} to {self._store.path(order.step)}: {why}; earlier checkpoints "
            "are intact; remove the cause and save again"
        )


def _warn_about(errors: Iterable[CheckpointError]) -> None:
    for error in errors:
        warn(str(error), CheckpointWarning)


def _paceline_version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"
