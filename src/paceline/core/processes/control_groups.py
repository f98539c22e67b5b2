"""The control groups of this process, by which Linux limits and counts what containers and batch jobs use."""

from __future__ import annotations

from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders_of(controller: str, mount: Path = MOUNT, own: Path = OWN) -> list[tuple[Path, Path]]:
    """Return the folder of each group of this process with `controller`, and that of its hierarchy, which is around it.

    A hierarchy of version 2 has all controllers, and is the mount itself. A container often sees its own group as the
    mount, and reads of the host's path to it, so that the folder need not be there.

    Args:
        controller: such as ``memory`` or ``cpu``.
        mount: the folder in which control groups are mounted.
        own: lists the groups of this process, as ``/proc/self/cgroup`` does.
    """
    found = []
    for line in own.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = mount / controller
        elif hierarchy == "0":
            root = mount
        else:
            continue
        found.append((root / path.lstrip("/"), root))
    return found
