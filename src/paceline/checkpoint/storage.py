"""The folder of a run's checkpoints: one folder per step, which appears whole or not at all.

    step-00000120/            a checkpoint
    .writing-step-00000120/   being written; left behind by a killed save, removed when the folder is opened
    .replaced-step-00000120/  the earlier checkpoint of a step that is saved again, for the moment between two
                              renames; brought back when the folder is opened, if the new one did not arrive
    .deleted-step-00000100/   being deleted

What is durable: a file after its fsync, a name after the fsync of its folder. Hence the order in
:meth:`commit`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.verify import Damaged, read_whole
from paceline.errors import CheckpointError, CheckpointWarning, UsageError

_STEP = re.compile(r"step-(\d{8,18})")
_OURS = re.compile(r"\.(writing|replaced|deleted)-(step-\d{8,18})")
_PROBE = ".probe"


def step_name(step: int) -> str:
    """The folder's name for `step`."""
    return f"step-{step:08d}"


class Storage:
    """The checkpoint folder `folder`, opened for one run.

    Raises:
        UsageError: if the folder cannot be made or written to, another run uses it, or it holds something
            that is no checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._named: set[int] = set()  # damaged steps that were warned of
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._refuse_foreign()
            self._clean()
            self._probe()
        except OSError as error:
            self._lock.release()
            raise self._unusable(error) from None
        except BaseException:
            self._lock.release()
            raise

    def steps(self) -> list[int]:
        """Steps that have a folder, whole or damaged, in ascending order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        try:
            names = [entry.name for entry in os.scandir(self.folder) if _is_step(entry)]
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint folder {self.folder} cannot be read: {reason(error)}; bring it back"
            ) from error
        return sorted(int(name.removeprefix("step-")) for name in names)

    def newest(self) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is whole, None if there is none. Warns of each damaged one, once."""
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                return path, read_whole(path, step)
            except Damaged as damage:
                if step not in self._named:
                    self._named.add(step)
                    warnings.warn(
                        f"the checkpoint {path} is damaged and skipped: {damage}",
                        CheckpointWarning,
                        stacklevel=2,
                    )
        return None

    def path(self, step: int) -> Path:
        """The folder of `step`."""
        return self.folder / step_name(step)

    def start(self, step: int) -> Path:
        """An empty temporary folder for `step`; hand it to :meth:`commit` or :meth:`abandon`.

        Raises:
            OSError: if it cannot be made.
        """
        draft = self.folder / f".writing-{step_name(step)}"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir()
        return draft

    def commit(self, draft: Path, step: int) -> Path:
        """Make the temporary folder `draft` the durable checkpoint of `step`, in place of one that may be
        there.

        Raises:
            OSError: if that fails; then the earlier checkpoint of `step` is where it was.
        """
        final, replaced = self.path(step), self.folder / f".replaced-{step_name(step)}"
        sync_folder(draft)
        self._named.discard(step)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        try:
            draft.rename(final)
            sync_folder(self.folder)
        except BaseException:
            if final.exists():
                final.rename(draft)
            if replaced.exists():
                replaced.rename(final)
            raise
        if replaced.exists():
            with suppress(OSError):  # removed when the folder is opened next
                self._delete(replaced, step)
        return final

    def abandon(self, draft: Path) -> None:
        """Remove what :meth:`start` made and what was written into it, as far as that is possible."""
        shutil.rmtree(draft, ignore_errors=True)

    def prune(self, step: int, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints up to `step`, which was just saved.

        Later ones, of a run that went further and was resumed from an earlier step, are left alone: they are
        not older. Failures are left to the next time.
        """
        with suppress(OSError, CheckpointError):
            for present in [present for present in self.steps() if present <= step][:-keep]:
                self._delete(self.path(present), present)

    def close(self) -> None:
        """Let other runs use the folder."""
        self._lock.release()

    def _delete(self, path: Path, step: int) -> None:
        """Delete a checkpoint so that a half-deleted one never has a checkpoint's name."""
        doomed = self.folder / f".deleted-{step_name(step)}"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _refuse_foreign(self) -> None:
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
            ours = _is_step(entry) or _OURS.fullmatch(entry.name) or entry.name == _PROBE
            if not ours:
                raise UsageError(
                    f"the checkpoint folder {self.folder} holds {entry.name!r}, which is no checkpoint; "
                    "choose a folder that is empty or holds checkpoints only"
                )

    def _clean(self) -> None:
        """Remove what a killed save left behind."""
        for entry in list(os.scandir(self.folder)):
            if not (match := _OURS.fullmatch(entry.name)):
                continue
            kind, name = match.groups()
            if kind == "replaced" and not (self.folder / name).exists():
                (self.folder / entry.name).rename(self.folder / name)
            else:
                shutil.rmtree(entry.path)

    def _probe(self) -> None:
        probe = self.folder / _PROBE
        probe.unlink(missing_ok=True)
        with probe.open("xb") as file:
            file.write(b"can this folder be written to?")
        probe.unlink()

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            f"the checkpoint folder {self.folder} cannot be used: {reason(error)}; "
            "choose a folder that this user can create and write to"
        )


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write `content` to the new file `path` and fsync it; its size in bytes and its SHA-256.

    Raises:
        OSError: if it cannot be written.
    """
    size, digest = 0, hashlib.sha256()
    with path.open("xb") as file:
        for piece in content:
            digest.update(piece)
            file.write(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable.

    Raises:
        OSError: if that fails.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """Why, without Python's number: ``No space left on device``."""
    return error.strerror or str(error)


def _is_step(entry: os.DirEntry[str]) -> bool:
    if not (match := _STEP.fullmatch(entry.name)):
        return False
    return entry.is_dir(follow_symlinks=False) and step_name(int(match[1])) == entry.name
