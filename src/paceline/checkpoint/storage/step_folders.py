"""The folder of a run's checkpoints: one folder per step, which appears whole or not at all.

    step-00000120/            a checkpoint
    .writing-step-00000120/   being written; left behind by a killed save, removed when the folder is opened
    .replaced-step-00000120/  the earlier checkpoint of a step that is saved again, for the moment between two
                              renames; brought back when the folder is opened, if the new one did not arrive
    .deleted-step-00000100/   being deleted

Folders are made with mode 0700 and files with 0600, minus the umask; an existing folder keeps its mode. Other entries
are left alone.

A file is durable after its fsync, and a name after the fsync of its folder. Hence the order in :meth:`commit`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.format import metadata as notes
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.metadata import Keep, Notes
from paceline.checkpoint.format.verify import Damaged, read_whole
from paceline.checkpoint.step_names import step_name, step_of
from paceline.checkpoint.storage.folder_lock import FolderLock
from paceline.checkpoint.storage.free_space import check_room
from paceline.core.telemetry.failpoints import strike
from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointError, CheckpointWarning, UsageError

_OURS = re.compile(r"\.(writing|replaced|deleted)-(step-\d{8,18})")
_PROBE = re.compile(r"\.probe-[0-9a-f]{16}")
FOLDER_MODE, FILE_MODE = 0o700, 0o600  # weights and data positions are private; the umask may remove more


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder in `folder`, whole or damaged, in ascending order."""
    try:
        folders = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint folder {folder} cannot be read: {reason(error)}; bring it back"
        ) from error
    return sorted(step for step in map(step_of, folders) if step is not None)


def newest(folder: Path, named: set[int]) -> tuple[Path, Manifest] | None:
    """Return the path and manifest of the newest whole checkpoint in `folder`, None if there is none.

    Warns of each damaged one, unless its step is in `named`, and adds it there.
    """
    for step in reversed(steps_in(folder)):
        path = folder / step_name(step)
        try:
            return path, read_whole(path, step)
        except Damaged as damage:
            if step not in named:
                named.add(step)
                warn(
                    f"the checkpoint {path} is damaged and skipped: {damage}",
                    CheckpointWarning,
                )
    return None


class Storage:
    """A checkpoint folder, opened for one run.

    Args:
        folder: the folder.
        goes_on: whether the run has completed steps already. Then it does not end because the folder cannot be written
            to: there is a warning, and every save tries again.
    """

    def __init__(self, folder: Path, goes_on: bool = False) -> None:
        self.folder = folder
        self.settled = threading.RLock()
        """Held while names change, and by readers: the folders they see are durable and stay while they read."""
        self._named: set[int] = set()  # damaged steps that were warned of
        self._has_warned_of_later = False
        self._lock: FolderLock | None = None
        """None while the folder cannot be opened."""
        try:
            _make(folder)
            self._lock = FolderLock(folder)
            self._clean()  # under the lock, because another run's save has a temporary folder
            self._probe()
        except OSError as error:
            if not goes_on:
                self.close()
                raise self._unusable(error) from None
            warn(
                f"the checkpoint folder {folder} cannot be written to: {reason(error)}; training goes on, and every "
                "save tries again",
                CheckpointWarning,
            )
        except BaseException:
            self.close()
            raise

    def steps(self) -> list[int]:
        """Return the steps that have a folder, whole or damaged, in ascending order."""
        return steps_in(self.folder)

    def newest(self) -> tuple[Path, Manifest] | None:
        """Return the newest whole checkpoint, None if there is none; warn of each damaged one, once."""
        return newest(self.folder, self._named)

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def start(self, step: int, size: int) -> Path:
        """Create an empty temporary folder for `step`; pass it to :meth:`commit` or :meth:`abandon`."""
        if self._lock is None:
            _make(self.folder)
        if self._lock is None or not self._lock.is_on(self.folder):  # removed and made again, so it holds nothing
            # The new one before the old one goes, so that an error leaves this object with a lock that it can
            # release.
            lock = FolderLock(self.folder)
            self.close()
            self._lock = lock
        # A failed save or a deletion that was cut off may have left names that this save needs.
        self._clean()
        final = self.path(step)
        if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
            raise FileExistsError(errno.EEXIST, f"{final.name} is there and is no folder")
        check_room(self.folder, size)
        draft = self.folder / f".writing-{step_name(step)}"
        draft.mkdir(FOLDER_MODE)
        return draft

    def commit(self, draft: Path, step: int) -> Path:
        """Make the temporary folder `draft` the durable checkpoint of `step`, and replace one that is there."""
        # Before the rename: after a crash, the name must not stand for a folder without some of its files.
        sync_folder(draft)
        strike("before-rename")
        with self.settled:
            path = self._rename(draft, step)
        strike("after-rename")
        return path

    def _rename(self, draft: Path, step: int) -> Path:
        final, replaced = self.path(step), self.folder / f".replaced-{step_name(step)}"
        self._named.discard(step)
        again = final.exists()
        if again:  # a rename cannot replace a folder that is not empty
            final.rename(replaced)
        try:
            draft.rename(final)
            sync_folder(self.folder)
        except BaseException:
            # The new name may not be durable, so the save has failed, and the earlier checkpoint gets its name back.
            if final.exists():
                final.rename(draft)
            if again:
                replaced.rename(final)
            raise
        if again:
            with suppress(OSError):  # removed when the folder is opened next
                self._delete(replaced, step)
        return final

    def abandon(self, draft: Path) -> None:
        """Remove the folder that :meth:`start` made, as far as possible."""
        shutil.rmtree(draft, ignore_errors=True)

    def notes(self) -> dict[int, Notes]:
        """Return the notes of every step."""
        return {step: notes.read(self.path(step)) for step in self.steps()}

    def prune(self, step: int, keep: Keep) -> None:
        """Delete the checkpoints that `keep` does not require after the save of `step`. Failures are retried later."""
        with self.settled, suppress(OSError, CheckpointError):
            found = self.notes()
            for doomed in keep.doomed(sorted(found), step, found):
                self._delete(self.path(doomed), doomed)

    def warn_of_later(self, step: int) -> None:
        """Warn, once, if there are later steps than `step`, which was saved and does not come from them."""
        later = step
        with suppress(CheckpointError):  # a folder that has gone is the next save's matter: this one is done
            # Damaged ones that were skipped are skipped again.
            later = max(set(self.steps()) - self._named, default=step)
        if later > step and not self._has_warned_of_later:
            self._has_warned_of_later = True
            warn(
                f"step {step} was saved into {self.folder}, which has step {later} of another run or branch: restore() "
                "without a step will go on from that one; save a branch into a folder of its own, or delete the later "
                "steps",
                CheckpointWarning,
            )

    def close(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            self._lock.release()

    def _delete(self, path: Path, step: int) -> None:
        """Delete a checkpoint so that a half-deleted one never has the name of a checkpoint."""
        doomed = self.folder / f".deleted-{step_name(step)}"
        # Left by a deletion that was cut off; the rename needs its name free.
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clean(self) -> None:
        """Remove the leftovers of a save that was killed or failed."""
        for entry in list(os.scandir(self.folder)):
            if _PROBE.fullmatch(entry.name):
                Path(entry.path).unlink()
            if not (match := _OURS.fullmatch(entry.name)) or not entry.is_dir(follow_symlinks=False):
                continue
            state, name = match.groups()
            if state == "replaced" and not (self.folder / name).exists():
                (self.folder / entry.name).rename(self.folder / name)
            else:
                shutil.rmtree(entry.path)

    def _probe(self) -> None:
        # A write, because os.access() does not notice a full quota.
        probe = self.folder / f".probe-{secrets.token_hex(8)}"
        write_file(probe, [b"can this folder be written to?"])
        probe.unlink()

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            f"the checkpoint folder {self.folder} cannot be used: {reason(error)}; "
            "choose a folder that this user can create and write to"
        )


def _make(folder: Path) -> None:
    """Make `folder` for this user alone; parent folders get the usual mode."""
    try:
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `content` to the new file `path` and fsync it; return its size in bytes and its SHA-256."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
        for piece in content:
            digest.update(piece)
            file.write(piece)
            size += len(piece)
        # Python's own buffer first: fsync() knows only of what the kernel has.
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable by fsync."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Return the reason of `error` without Python's number: ``No space left on device``."""
    return error.strerror or str(error)
