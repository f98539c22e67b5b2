"""Copies rescued checkpoints from memory into the folders that they belong to; run by the launcher when a job ends.

``python -m paceline.checkpoint.keep_rescued FOLDER``, with a folder for each checkpoint folder in it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from paceline.checkpoint import storage
from paceline.checkpoint.rescue import DESTINATION
from paceline.checkpoint.run_folder import newest_rescued
from paceline.checkpoint.storage import Storage, reason
from paceline.errors import UsageError


def keep(folder: Path) -> tuple[str, bool] | None:
    """Copy the newest checkpoint in the rescued `folder`, if that is newer than those on disk.

    Returns:
        a line for the user, and whether it is where a resume looks for it; None if nothing is to copy.
    """
    found = newest_rescued(folder)
    if found is None:
        return None
    path, manifest = found
    destination = Path((folder / DESTINATION).read_text())
    if any(step >= manifest.step for step in storage.steps_in(destination)):
        return None
    try:
        store = Storage(destination)
        draft = store.start(manifest.step, sum(file.stat().st_size for file in path.iterdir()))
        try:
            for file in path.iterdir():
                with open(file, "rb") as content:
                    storage.write_file(draft / file.name, iter(lambda: content.read(2**22), b""))
            final = store.commit(draft, manifest.step)
        except BaseException:
            store.abandon(draft)
            raise
    except (OSError, UsageError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        kept = Path(shutil.copytree(path, Path.home() / f"rescued-{folder.name}-{path.name}"))
        return f"step {manifest.step} cannot be saved to {destination} ({why}); it is kept in {kept}", False
    return f"the last completed step, {manifest.step}, is saved to {final}", True


if __name__ == "__main__":
    kept = [told for each in sorted(Path(sys.argv[1]).iterdir()) if each.is_dir() and (told := keep(each)) is not None]
    for line, _ in kept:
        print(line)
    sys.exit(0 if all(is_saved for _, is_saved in kept) else 1)
