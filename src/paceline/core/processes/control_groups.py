"""The control groups of this process, in which Linux limits the resources of containers and batch jobs."""

from __future__ import annotations

from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders_of(controller: str, mount: Path = MOUNT, own: Path = OWN) -> list[tuple[Path, Path]]:
    """Return the folders of this process's groups with `controller`, each with the root folder of its hierarchy.

    The hierarchy of version 2 has all controllers and is the mount itself. A container often sees its group as the
    mount but reads the host's path, so a folder need not exist.

    Args:
        controller: such as ``memory`` or ``cpu``.
        mount: the mount point of the control groups.
        own: the file that lists the groups of this process.
    """
    folders = []
    for line in own.read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = mount / controller
        elif hierarchy == "0":
            root = mount
        else:
            continue
        folders.append((root / path.lstrip("/"), root))
    return folders
