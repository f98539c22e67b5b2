"""A lock on a folder, released when the process that holds it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from paceline.core.telemetry.users_code import warn
from paceline.errors import CheckpointWarning, UsageError

UNSUPPORTED = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of a file system that does not support an operation."""


class FolderLock:
    """An exclusive ``flock`` on `folder` itself, so that no lock file is left behind.

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
                f"another run is using the checkpoint folder {folder} on rank 0's host; end that run, close() its "
                "Checkpointer if it is in this process, or choose another folder"
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
