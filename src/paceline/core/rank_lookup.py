"""Look up a property of this rank, in the world or in one dimension of a device mesh: ``paceline.get``.

paceline.get("rank")                        among all ranks
paceline.get("rank", mesh["dp"])            along a mesh's dimension, given as a 1-D mesh
paceline.get.register_mesh(mesh)
paceline.get("rank", "dp")                  along that dimension of the registered mesh
paceline.get("rank")                        in the registered mesh, if that has one dimension and no names

:class:`cache_mesh` passes a registered mesh to a user's function.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.world import current
from paceline.errors import UsageError, WorldError

Answer = TypeVar("Answer")
Where = DeviceMesh | str | None
NAMES = ("ws", "rank", "pg", "grank", "lrank", "device")
"""The first three belong to one group of ranks: the world, or one dimension of a mesh."""


class _Registration:
    """A registered mesh. It is dropped when its process group is destroyed."""

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._group: Any = None
        """Weak reference to the default process group at the time of registration."""

    def set(self, mesh: DeviceMesh) -> None:
        """Register `mesh` until another mesh is registered or the process group is destroyed."""
        self._mesh, self._group = mesh, weakref.ref(dist.group.WORLD)

    def get(self) -> DeviceMesh | None:
        """Return the registered mesh, or None."""
        if self._mesh is None or not dist.is_initialized() or self._group() is not dist.group.WORLD:
            return None
        return self._mesh


class Get:
    """Look up a property of this rank by a short name: ``get(what, dm=None)``.

    | what       | without a mesh                          | with one dimension of a mesh        |
    |------------|-----------------------------------------|-------------------------------------|
    | ``ws``     | number of all ranks                     | number of ranks along it            |
    | ``rank``   | rank among all ranks                    | rank in its process group           |
    | ``pg``     | process group of all ranks              | process group of the ranks along it |
    | ``grank``  | rank among all ranks                    | the same                            |
    | ``lrank``  | rank on this host                       | the same                            |
    | ``device`` | this rank's device                      | this rank's device in the mesh      |

    ``dm`` is a one-dimensional ``DeviceMesh``, such as the slice ``mesh["dp"]``, or the name of a dimension of the
    registered mesh (see :meth:`register_mesh`). A mesh also counts as one-dimensional if all other dimensions have
    size 1, such as ``DeviceMesh("cpu", [[0, 1]])``. A registered mesh without names is the default for calls without a
    mesh, and ``lrank`` is then this rank's index in it. ``rank`` is the rank in the process group. torch sorts the
    ranks of some groups, so it can differ from the coordinate in a mesh whose ranks are not in order.

    Raises:
        WorldError: before :func:`paceline.init`, if this rank is not part of the mesh, or if a name is given and no
            mesh is registered.
        UsageError: if the name is unknown, or if the mesh has several dimensions and one is required.
    """

    def __init__(self) -> None:
        self._registered = _Registration()

    @overload
    def __call__(self, what: Literal["ws", "rank", "grank", "lrank"], dm: Where = None) -> int: ...

    @overload
    def __call__(self, what: Literal["pg"], dm: Where = None) -> dist.ProcessGroup: ...

    @overload
    def __call__(self, what: Literal["device"], dm: Where = None) -> torch.device: ...

    def __call__(self, what: str, dm: Where = None) -> Any:
        """Return the value with the name `what`; see the class."""
        if what not in NAMES:
            raise UsageError(f"get({what!r}) is unknown; use one of {', '.join(NAMES)}")
        world, mesh = current(), dm
        if mesh is None and what != "grank":
            mesh = self._registered.get()
            mesh = None if mesh is None or mesh.mesh_dim_names else mesh  # only a mesh without names is the default
        if mesh is None:
            return {
                "ws": world.size,
                "rank": world.rank,
                "pg": dist.group.WORLD,
                "grank": world.rank,
                "lrank": world.local_rank,
                "device": world.device,
            }[what]
        mesh = self._named(mesh) if isinstance(mesh, str) else _check_mesh(mesh)
        if mesh.get_coordinate() is None:
            raise WorldError(
                f"rank {world.rank} is not part of the mesh, which has ranks {mesh.mesh.flatten().tolist()}; "
                "call get() only on those ranks"
            )
        if what == "grank":
            return world.rank
        if what == "device":
            return _device(mesh)
        if what == "lrank" and mesh.mesh_dim_names:
            return world.local_rank
        dimension = _dimension(mesh, what)
        if what == "ws":
            return mesh.size(dimension)
        if what == "pg":
            return mesh.get_group(dimension)
        return mesh.get_local_rank(dimension)

    def register_mesh(self, mesh: DeviceMesh) -> Get:
        """Let later calls name the dimensions of `mesh`, until another mesh is registered or the group is destroyed.

        If the mesh has a single dimension and no names, calls without a mesh use it from then on.
        """
        current()  # raises before init()
        if not _check_mesh(mesh).mesh_dim_names and len(_dimensions(mesh)) > 1:
            raise UsageError(
                "the mesh has no dimension names; create it with "
                f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.mesh.shape)}, mesh_dim_names=(…))"
            )
        self._registered.set(mesh)
        return self

    def _named(self, name: str) -> DeviceMesh:
        if (mesh := self._registered.get()) is None:
            raise WorldError(
                f"dimension {name!r} is unknown, because no mesh is registered in this process group; call "
                "paceline.get.register_mesh(mesh) first, or pass the mesh"
            )
        if not mesh.mesh_dim_names:
            raise UsageError(f"dimension {name!r} is unknown, because the registered mesh has no names; leave it out")
        try:
            return mesh[name]
        except KeyError:
            names = ", ".join(map(repr, mesh.mesh_dim_names))
            raise UsageError(f"the registered mesh has no dimension {name!r}; it has {names}") from None


class cache_mesh(Generic[Answer]):
    """A decorator for functions whose second parameter is a mesh: calls without a mesh get the registered mesh::

        @paceline.cache_mesh
        def size_of(what, mesh=None):
            return mesh.size() if mesh is not None else dist.get_world_size()

        size_of.register_mesh(mesh)
        size_of("ranks")                  with the registered mesh
        size_of("ranks", mesh=other)      with another mesh

    The mesh is registered until the process group is destroyed; without one, the function receives None.
    """

    def __init__(self, function: Callable[..., Answer]) -> None:
        self._function, self._signature = function, inspect.signature(function)
        self._mesh_name = (*self._signature.parameters, "", "")[1]
        self._registered = _Registration()
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **options: Any) -> Answer:
        """Call the function, with the registered mesh if none is given."""
        call = self._signature.bind_partial(*arguments, **options)
        if call.arguments.get(self._mesh_name) is None:
            call.arguments[self._mesh_name] = self._registered.get()
        return self._function(*call.args, **call.kwargs)

    def register_mesh(self, mesh: DeviceMesh) -> cache_mesh[Answer]:
        """Pass `mesh` to later calls without a mesh, until another is registered or the process group is destroyed.

        Raises:
            UsageError: if it is not a ``DeviceMesh``.
            WorldError: before :func:`paceline.init`.
        """
        current()  # raises before init()
        self._registered.set(_check_mesh(mesh))
        return self


def _check_mesh(mesh: Any) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh must be a DeviceMesh or the name of a dimension of the registered one, not {type(mesh).__name__}"
        )
    return mesh


def _dimensions(mesh: DeviceMesh) -> list[int]:
    """Return the dimensions with more than one rank."""
    return [index for index in range(mesh.ndim) if mesh.size(index) > 1]


def _dimension(mesh: DeviceMesh, what: str) -> int:
    """Return the only dimension of `mesh` with more than one rank."""
    if mesh.ndim == 1 or (not mesh.mesh_dim_names and len(_dimensions(mesh)) <= 1):
        return next(iter(_dimensions(mesh)), mesh.ndim - 1)
    names = mesh.mesh_dim_names
    remedy = f"pass one of them, mesh[{names[0]!r}]" if names else "pass a mesh of one dimension"
    raise UsageError(
        f"get({what!r}) needs one dimension, but the mesh has {mesh.ndim}"
        f"{' (' + ', '.join(names) + ')' if names else ''}; {remedy}"
    )


def _device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device, of the mesh's device type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


get = Get()
