"""Copies rescued checkpoints from memory into their checkpoint folders. The launcher runs this module when a job ends.

``persist_rescued FOLDER`` copies from each subfolder of FOLDER.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from paceline.checkpoint import step_folders
from paceline.checkpoint.recovery import DESTINATION
from paceline.checkpoint.run_folder import newest_rescued
from paceline.checkpoint.step_folders import Storage, reason
from paceline.errors import PacelineError


def keep(folder: Path) -> tuple[str, bool] | None:
    """Copy the newest checkpoint from `folder` in memory, if it is newer than the checkpoints on disk.

    Returns:
        A line for the user, and whether a resume will find the copy; None if no copy is needed.
    """
    newest = newest_rescued(folder)
    if newest is None:
        return None
    path, manifest = newest
    destination = Path((folder / DESTINATION).read_text(errors="surrogateescape"))
    if folder.parent.parent in destination.parents:  # a Trainer without a Checkpointer
        return (
            f"the last completed step, {manifest.step}, is lost because the training has no checkpoint folder; "
            "give it one: Checkpointer(folder), or --checkpoint-dir of a recipe"
        ), False
    try:
        if any(step >= manifest.step for step in step_folders.steps_in(destination)):
            return None
        final = _copy(path, manifest.step, Storage(destination))
    except (OSError, PacelineError) as error:
        why = f"step {manifest.step} cannot be saved to {destination} ({_reason(error)})"
        return f"{why}; {_put_elsewhere(path, folder.name, destination)}", False
    return f"the last completed step, {manifest.step}, is saved to {final}", True


def _copy(path: Path, step: int, store: Storage) -> Path:
    """Copy the checkpoint `path` into `store`; return its new path."""
    draft = store.start(step, sum(file.stat().st_size for file in path.iterdir()))
    try:
        for file in path.iterdir():
            with open(file, "rb") as content:
                # write_file() syncs, unlike shutil.
                step_folders.write_file(draft / file.name, iter(lambda: content.read(2**22), b""))
        return store.commit(draft, step)
    except BaseException:
        store.abandon(draft)
        raise


def _put_elsewhere(path: Path, key: str, destination: Path) -> str:
    """Copy the checkpoint `path` to the user's home folder; return the rest of the message."""
    try:
        fallback = Path(tempfile.mkdtemp(prefix=f"rescued-{key}-", dir=Path.home()))
        try:
            shutil.copytree(path, fallback / path.name)
        except BaseException:
            shutil.rmtree(fallback, ignore_errors=True)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return f"it is lost because it cannot be copied to the home folder either ({_reason(error)})"
    return f"it is kept in {fallback / path.name}; to resume from it, make room and move that folder to {destination}"


def _reason(error: Exception) -> object:
    if isinstance(error, shutil.Error):  # raised by copytree: a list of files with their errors
        return error.args[0][0][2]
    return reason(error) if isinstance(error, OSError) else error


if __name__ == "__main__":
    all_saved = True
    for subfolder in sorted(Path(sys.argv[1]).iterdir()):
        if subfolder.is_dir() and (result := keep(subfolder)) is not None:
            print(result[0].encode(errors="backslashreplace").decode())  # a path may not be UTF-8
            all_saved = all_saved and result[1]
    sys.exit(0 if all_saved else 1)
