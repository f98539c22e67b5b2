"""A save: every rank captures its states, the ranks agree, and rank 0 writes the files and a manifest."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import captures, manifest, safetensors_file, step_folders
from paceline.checkpoint.captures import Capture
from paceline.checkpoint.manifest import RANK_ROLE, File, Manifest
from paceline.checkpoint.metadata import METADATA, Keep, Notes
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.state_codec import Encoder
from paceline.checkpoint.step_folders import Storage, reason
from paceline.core import consensus, strict_json
from paceline.core.failpoints import strike
from paceline.core.stacks import warn
from paceline.core.torch_distributed import local_of
from paceline.core.world import World
from paceline.errors import CheckpointError, CheckpointWarning, DesyncError, UsageError

Part = tuple[int | None, Capture]
"""A rank and its own states, or None and the state of a shared object."""


@dataclass(frozen=True)
class Save:
    """A save of `step` by `world_size` ranks, with `size` bytes of tensors and the user's notes."""

    step: int
    world_size: int
    size: int
    notes: Notes


def capture_all(
    world: World, step: int, entries: Sequence[Registered], note: Callable[[], Notes]
) -> tuple[Save, list[Capture]]:
    """Capture the states of `entries` at `step`, and check that all ranks save the same step and objects.

    Returns:
        The description of the save, and this rank's captures: one for each shared object, then one with this rank's own
        states.
    """
    notes: list[Notes] = []
    captured: list[Capture] = []

    def take() -> None:
        captured.extend(captures.shared(entry, world.rank == 0) for entry in entries if not entry.per_rank)
        captured.append(captures.own([*(entry for entry in entries if entry.per_rank), captures.generators()]))

    def prepare() -> None:
        notes.append(note())
        if type(step) is not int or not 0 <= step < 10**18:
            raise UsageError(f"step must be a whole number >= 0, not {step!r}")
        for entry in entries:
            entry.check_window(step)
        with _explained(step):
            if not any(entry.is_sharded for entry in entries):
                take()
                return
            # A dry run on this rank's shards detects states that cannot be saved, without waiting for other ranks.
            for entry in entries:
                entry.capture(Encoder(None if entry.per_rank else local_of))

    def gather() -> None:
        with _explained(step):
            take()

    names = [f"{entry.name} (per rank)" if entry.per_rank else entry.name for entry in entries]
    sizes = _agree(world, step, names, prepare, captured)
    if not captured:
        # DTensors are gathered after all ranks have prepared without an error, because a gather needs all ranks.
        sizes = _agree(world, step, names, gather, captured)
    return Save(step, world.size, sum(sizes), notes[0]), captured


def _agree(
    world: World, step: int, names: list[str], action: Callable[[], None], captured: Sequence[Capture]
) -> list[int]:
    """Call `action` on every rank, compare `step` and `names`, and return the number of bytes that each rank saves."""
    error = consensus.error_of(action)
    saved = captured if world.rank == 0 else captured[-1:]
    size = sum(step_folders.needed(capture.tensors.values()) for capture in saved)
    facts = consensus.agree(world, error, None if error else {"step": step, "names": names, "size": size})
    for rank, report in enumerate(facts):
        if report["names"] != names:
            raise UsageError(
                f"rank {rank} has registered {report['names']} but rank {world.rank} has registered {names}; register "
                "the same objects in the same order on every rank"
            )
        if report["step"] != step:
            raise DesyncError(
                f"rank {rank} saves step {report['step']} but rank {world.rank} saves step {step}; "
                "save after the same number of steps on every rank"
            )
    return [report["size"] for report in facts]


@contextmanager
def _explained(step: int) -> Iterator[None]:
    try:
        yield
    # The state_dict() of a user's object can raise anything.
    except Exception as error:
        raise CheckpointError(f"step {step} was not saved: {error}") from error


@contextmanager
def parts(world_size: int, own_captures: Sequence[Capture]) -> Iterator[Iterator[Part]]:
    """Yield rank 0's captures (its own states last), then fetch and yield the capture of each other rank.

    If the block raises, rank 0 declines the captures of the remaining ranks.
    """
    *shared, own_states = own_captures
    waiting = list(range(1, world_size))

    def all_parts() -> Iterator[Part]:
        for states in shared:
            yield None, states
        yield 0, own_states
        while waiting:  # fetch captures one by one, so that rank 0 never holds the states of all ranks
            rank = waiting.pop(0)
            yield rank, captures.fetch(rank)

    try:
        yield all_parts()
    finally:
        # Skip the rank whose transfer has begun, because it can no longer be declined.
        for rank in waiting:
            captures.decline(rank)


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
            add(METADATA, METADATA, [order.notes.render()])
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


class Staging:
    """Memory for one copy of rank 0's states, reused by every save because new pages are expensive."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str], torch.Tensor] = {}
        """The copies, by the number of the capture and the name of the tensor."""

    def copies(self, captures: Sequence[Capture]) -> list[Capture]:
        """Return copies of `captures` on the CPU, overwriting the previous copies."""
        return [
            replace(capture, tensors={name: self._copy((number, name), of) for name, of in capture.tensors.items()})
            for number, capture in enumerate(captures)
        ]

    def _copy(self, key: tuple[int, str], tensor: torch.Tensor) -> torch.Tensor:
        memory = self._memory.get(key)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            try:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
            except RuntimeError as error:  # raised by torch if memory is exhausted
                raise MemoryError(f"not enough memory for a copy of {tensor.nbytes} bytes ({error})") from error
            self._memory[key] = memory
        return memory.copy_(tensor)


def _warn_about(errors: Iterable[CheckpointError]) -> None:
    for error in errors:
        warn(str(error), CheckpointWarning)


def _paceline_version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "unknown"
