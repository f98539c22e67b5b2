"""The folder of a run's checkpoints: one folder per step, which appears completely or not at all.

    step-00000120/            a checkpoint
    .writing-step-00000120/   being written; after a killed save it is removed when the folder is opened
    .replaced-step-00000120/  the earlier checkpoint of a step that is saved again, between two renames; restored when
                              the folder is opened, if the new one is missing
    .deleted-step-00000100/   being deleted; if that fails, every later save tries again

A name ends in ``.1`` if an entry that cannot be deleted has the usual one. A step can also be a link to a
checkpoint elsewhere: it is read like any other, but only the link is ever replaced or deleted.

Folders are made with mode 0700 and files with 0600, minus the umask. An existing folder keeps its mode, and other
entries are left alone.

A file is durable after its fsync, and a name after the fsync of its folder, which explains the order in :meth:`commit`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import torch

from paceline.checkpoint.manifest import Damaged, Manifest, Value, read_manifest, read_whole
from paceline.checkpoint.metadata import Keep, Notes
from paceline.checkpoint.safetensors_file import spec_of
from paceline.checkpoint.step_names import step_name, step_of
from paceline.core.failpoints import strike
from paceline.core.messages import nbytes
from paceline.core.stacks import warn
from paceline.errors import CheckpointError, CheckpointWarning, NoCheckpoint, UsageError

_OURS = re.compile(r"\.(writing|replaced|deleted)-([^.]+)(?:\.1)*")
FOLDER_MODE, FILE_MODE = 0o700, 0o600
UNSUPPORTED = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of a file system that does not support an operation."""
MOST_CHANGES = 100
"""How often a running job may change the checkpoints that :func:`newest` reads."""
PER_TENSOR = 512
"""Bytes for a tensor's entries in the header, the manifest and ``state.json``."""
MARGIN = 64 * 2**10
"""Bytes for plain values, and for rounding to whole blocks."""


class Storage:
    """A checkpoint folder, opened for one run.

    Args:
        folder: the folder.
        has_progress: whether the run has completed steps. If so, an unwritable folder only causes a warning, and every
            save tries again.
    """

    def __init__(self, folder: Path, has_progress: bool = False) -> None:
        self.folder = folder
        self.settled = threading.RLock()
        """Held while names change or folders are read, so that the folders read are durable and stay in place."""
        self._named: set[int] = set()  # damaged steps that were reported
        self._undeletable: set[Path] = set()  # folders that were reported
        self._has_warned_of_later = False
        self._lock: FolderLock | None = None
        """None while the folder cannot be opened."""
        try:
            _make(folder)
            self._lock = FolderLock(folder)
            self._clean()  # under the lock, because another run's save has a temporary folder
            _refuse_newer(folder)
            _probe(folder)
        except OSError as error:
            if not has_progress:
                self.close()
                raise UsageError(
                    f"the checkpoint folder {folder} cannot be used: {reason(error)}; "
                    "choose a folder that this user can create and write to"
                ) from None
            warn(
                f"the checkpoint folder {folder} cannot be written to: {reason(error)}; training continues, and every "
                "save tries again",
                CheckpointWarning,
            )
        except BaseException:
            self.close()
            raise

    def steps(self) -> list[int]:
        """Return the steps that have a folder, intact or damaged, in ascending order."""
        return steps_in(self.folder)

    def newest(self) -> tuple[Path, Manifest] | None:
        """Return the newest intact checkpoint, or None; warn once about each damaged one."""
        return newest(self.folder, self._named, read_whole)

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def start(self, step: int, size: int) -> Path:
        """Create an empty temporary folder for `step`; pass it to :meth:`commit` or :meth:`abandon`."""
        if self._lock is None:
            _make(self.folder)
        if self._lock is None or not self._lock.is_on(self.folder):  # the folder was removed and re-created
            _refuse_newer(self.folder)
            # The old lock is released last, so that an error leaves this object with a lock.
            lock = FolderLock(self.folder)
            self.close()
            self._lock = lock
        self._clean()  # what a failed save or an interrupted deletion left takes up space
        final = self.path(step)
        if os.path.lexists(final) and not (final.is_symlink() or final.is_dir()):
            raise FileExistsError(errno.EEXIST, f"{final.name} exists and is not a folder")
        check_room(self.folder, size)
        draft = self._unused("writing", step)
        draft.mkdir(FOLDER_MODE)
        return draft

    def commit(self, draft: Path, step: int) -> Path:
        """Make the temporary folder `draft` the durable checkpoint of `step`, replacing an existing one."""
        # Sync before the rename, because after a crash the final name must belong to a complete folder.
        sync_folder(draft)
        strike("before-rename")
        with self.settled:
            path = self._rename(draft, step)
        strike("after-rename")
        return path

    def _rename(self, draft: Path, step: int) -> Path:
        final, replaced = self.path(step), self._unused("replaced", step)
        self._named.discard(step)
        already_exists = os.path.lexists(final)
        if already_exists:  # a rename cannot replace a non-empty folder
            final.rename(replaced)
        try:
            draft.rename(final)
            sync_folder(self.folder)
        except BaseException:
            # The new name may not be durable, so the save has failed, and the earlier checkpoint is restored.
            if final.exists():
                final.rename(draft)
            if already_exists:
                replaced.rename(final)
            raise
        if already_exists:
            self._delete(replaced, step)
        return final

    def abandon(self, draft: Path) -> None:
        """Remove as much of a temporary folder as possible."""
        shutil.rmtree(draft, ignore_errors=True)

    def notes(self) -> dict[int, Notes]:
        """Return the notes of every step."""
        return {step: Notes.read(self.path(step)) for step in self.steps()}

    def prune(self, step: int, keep: Keep) -> None:
        """Delete the checkpoints that `keep` does not need after the save of `step`; the next save retries failures."""
        with self.settled, suppress(OSError, CheckpointError):
            all_notes = self.notes()
            for outdated in keep.outdated(sorted(all_notes), step, all_notes):
                self._delete(self.path(outdated), outdated)

    def warn_of_later(self, step: int) -> None:
        """Warn, once, if there are later steps than `step`, which was just saved."""
        later = step
        with suppress(CheckpointError):  # the next save reports a missing folder
            later = max(set(self.steps()) - self._named, default=step)
        if later > step and not self._has_warned_of_later:
            self._has_warned_of_later = True
            warn(
                f"step {step} was saved into {self.folder}, which has the later step {later} of another run, and "
                "restore() will continue from that one; save into another folder, or delete the later steps",
                CheckpointWarning,
            )

    def close(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            self._lock.release()

    def _unused(self, state: str, step: int) -> Path:
        """Return a name for the folder of `step` in a `state`, other than those of folders that cannot be deleted."""
        path = self.folder / f".{state}-{step_name(step)}"
        while os.path.lexists(path):
            path = path.with_name(f"{path.name}.1")
        return path

    def _delete(self, path: Path, step: int) -> None:
        """Delete a folder or a link. If that fails, warn once; the next save tries again.

        It is renamed first, so that a half-deleted folder does not look like a checkpoint.
        """
        try:
            if not path.name.startswith(".deleted-"):
                path = path.rename(self._unused("deleted", step))
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        except OSError as error:
            if path not in self._undeletable:
                self._undeletable.add(path)
                warn(f"{path} cannot be deleted: {reason(error)}; every save tries again", CheckpointWarning)

    def _clean(self) -> None:
        """Remove the remains of a save that was killed or failed."""
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name, reverse=True):  # the latest first
            match = _OURS.fullmatch(entry.name) if entry.is_symlink() or entry.is_dir() else None
            if match is None or (step := step_of(match[2])) is None:
                continue
            if match[1] == "replaced" and not os.path.lexists(self.path(step)):
                Path(entry.path).rename(self.path(step))
            else:
                self._delete(Path(entry.path), step)


def _refuse_newer(folder: Path) -> None:
    """Raise if `folder` has a checkpoint of a newer format, which this version must not replace or delete."""
    for step in steps_in(folder):
        with suppress(Damaged):
            read_manifest(folder / step_name(step), step)


def _probe(folder: Path) -> None:
    """Write a file and remove it, because os.access() does not notice a full quota."""
    probe = folder / ".probe"
    probe.unlink(missing_ok=True)  # the file is left from a process that was killed here
    write_file(probe, [b"can this folder be written to?"])
    probe.unlink()
    if not sync_folder(folder):
        warn(f"the file system of {folder} cannot sync folders; a power failure may lose a save", CheckpointWarning)


def _make(folder: Path) -> None:
    """Create `folder` for this user only; parent folders get the usual mode."""
    try:
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


class FolderLock:
    """An exclusive ``flock`` on `folder` itself, which leaves no lock file behind and ends with this process.

    Forked children (DataLoader workers) close the descriptor immediately, so that they do not keep the lock if they
    outlive this process.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        """Closes the descriptor once; other processes that share it keep the lock."""
        self._close.atexit = False  # the rescue at exit needs the lock
        os.register_at_fork(after_in_child=self._close)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run is using the checkpoint folder {folder} on rank 0's host; end that run, or close() its "
                "Checkpointer in this process; create Checkpointers after paceline.init(), or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warn(
                f"the file system of the checkpoint folder {folder} does not support locks "
                f"({error.strerror}); make sure that no other run uses it",
                CheckpointWarning,
            )

    def is_on(self, folder: Path) -> bool:
        """Return whether the folder at this path is still the locked folder, and has not been replaced."""
        current, locked = os.stat(folder), os.fstat(self._descriptor)
        return (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino)

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._close.alive:
            # Closing is not enough while a forked child still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._close()


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder or a link in `folder`, intact or damaged, in ascending order."""
    try:
        folders = [entry.name for entry in os.scandir(folder) if entry.is_symlink() or entry.is_dir()]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint folder {folder} cannot be read: {reason(error)}; restore the folder"
        ) from error
    return sorted(step for step in map(step_of, folders) if step is not None)


def identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the folder `path` is replaced or loses a file; None if it does not exist."""
    try:
        about = os.stat(path, follow_symlinks=os.path.exists(path))  # a link that cannot be followed exists, too
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def newest(folder: Path, named: set[int], read: Callable[[Path, int], Value]) -> tuple[Path, Value] | None:
    """Return the path of the newest intact checkpoint in `folder` and the result of `read` for it, or None.

    Warn about each damaged one, unless its step is in `named`, and add it to `named`. If a running job deletes or
    replaces a checkpoint while it is read, start over with the newest.
    """
    steps, changes = steps_in(folder), 0
    while steps:
        step = steps.pop()
        path = folder / step_name(step)
        before = identity(path)
        try:
            return path, read(path, step)
        except (Damaged, CheckpointError) as error:
            if before is None or identity(path) != before:
                changes += 1
                if changes > MOST_CHANGES:
                    raise CheckpointError(
                        f"the checkpoints in {folder} were deleted or replaced {changes} times while they were read; "
                        "read them when the job saves less often"
                    ) from error
                steps = steps_in(folder)
            elif isinstance(error, CheckpointError):
                raise
            elif step not in named:
                named.add(step)
                warn(f"the checkpoint {path} is damaged and skipped: {error}", CheckpointWarning)
    return None


def intact(path: Path, step: int, read: Callable[[Path, int], Value]) -> Value:
    """Return the result of `read` for the checkpoint `path` of `step`; raise if it is damaged."""
    try:
        return read(path, step)
    except Damaged as damage:
        fault = f"is damaged: {damage}" if os.path.lexists(path) else "was deleted while it was read"
        raise NoCheckpoint(f"the checkpoint {path} {fault}; choose another step, or the newest intact one") from None


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `content` to the new file `path` and fsync it; return its size in bytes and its SHA-256."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        for piece in content:
            digest.update(piece)
            file.write(piece)
            size += len(piece)
        file.flush()  # fsync() does not see Python's buffer
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> bool:
    """Make the names in `folder` durable; return whether its file system supports that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return True
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Return the reason of `error` without its number: ``No space left on device``."""
    return error.strerror or str(error)


def needed(tensors: Collection[torch.Tensor]) -> int:
    """Return the number of bytes that `tensors` need in a checkpoint, without :data:`MARGIN`."""
    return sum(spec_of(tensor).nbytes for tensor in tensors) + PER_TENSOR * len(tensors)


def check_room(folder: Path, size: int) -> None:
    """Check that the file system of `folder` has space for `size` bytes, if it reports its free space."""
    free = _free(folder)
    if free is not None and free < size + MARGIN:
        figures = f"{nbytes(size + MARGIN)} are needed, but only {nbytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {figures}")


def full_memory_message(error: OSError, folder: Path) -> str:
    """Return the message for ranks that cannot rescue steps because the job's `folder` is full."""
    return (
        "a failure will cost the steps since the last save on disk, because the job's folder is full "
        f"({folder.parent.parent}: {error.strerror or error}); enlarge it (in a container: docker run --shm-size=8g), "
        "or choose another folder with PACELINE_JOBS"
    )


def _free(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`; None if it does not report them."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return None  # the write will report the problem
    if about.f_blocks == 0:
        return None  # on some network file systems
    blocks = about.f_bfree if os.geteuid() == 0 else about.f_bavail  # some blocks are reserved for root
    return blocks * about.f_frsize
