"""Number of processes that the kernel killed for lack of memory, counted by this process's control group."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_kills(mount: Path = MOUNT, own: Path = OWN) -> int | None:
    """Return how many processes of this control group were killed so far; None if there is no counter.

    Args:
        mount: the folder in which control groups are mounted.
        own: lists the groups of this process, as ``/proc/self/cgroup`` does.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for file in _counters(mount, lines):
        with suppress(OSError, ValueError):
            counts = dict(line.split(" ", 1) for line in file.read_text().splitlines() if " " in line)
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _counters(mount: Path, lines: list[str]) -> list[Path]:
    """Return the files that may have the count, of version 1 and 2, the group's own before that of the mount.

    A container often sees its own group as the mount, and reads of the host's path to it.
    """
    files = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.oom_control"
        elif hierarchy == "0":
            root, name = mount, "memory.events"
        else:
            continue
        files += [root / path.lstrip("/") / name, root / name]
    return files
