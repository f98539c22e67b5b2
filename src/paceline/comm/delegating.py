"""Collectives that a process group delegates to Gloo, and to NCCL for CUDA tensors."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from paceline.comm.forking import keep_in_children
from paceline.comm.gloo import connect_gloo
from paceline.comm.work import Runner
from paceline.core.stores import connecting
from paceline.core.torch_internals import class_never_compiled, tree_leaves
from paceline.errors import UsageError

_LEAVE_S = 0.5
"""Seconds to wait at exit for operations under way before giving up on other ranks."""


def _delegated(name: str, *, needs_contiguous: bool = False) -> Any:
    """Return a method that passes the collective `name` on to Gloo or NCCL."""

    def collective(group: Delegating, *arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        backend = group._backend_for_contiguous(tensors) if needs_contiguous else group._backend_for(tensors[0])
        return getattr(backend, name)(*arguments)

    return collective


@class_never_compiled
class Delegating(dist.ProcessGroup):
    """The part of a process group that calls Gloo and NCCL.

    A delegated collective first waits for this rank's earlier native ones, to keep the order of operations. Sends and
    receives do not wait, because the other rank may not have called those collectives yet.

    If the group is not connected yet, its first delegated operation calls :meth:`connect`, and all ranks must take part
    in that operation.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._unconnected: tuple[Store, Sequence[int]] | None = (store, names)
        self.timeout = timeout
        self._runner = Runner(f"paceline rank {rank}")
        keep_in_children(self)
        _groups().add(self)

    own_name: str = ""
    """Name of a group that torch does not know. torch keeps a group's name in its backends, which may not exist yet."""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The group's name."""
        return self.own_name or super().group_name

    def connect(self) -> None:
        """Connect Gloo, and NCCL if there is a GPU. All ranks call this; it has no effect if they are connected."""
        if self._unconnected is None:
            return
        store, names = self._unconnected
        with connecting(PrefixStore("connect/", store), self.rank(), self.size(), self.timeout, names):
            self._connect(store, names)

    def _connect(self, store: Store, names: Sequence[int]) -> None:
        """Connect the backends; the caller holds :func:`connecting` open."""
        gloo = connect_gloo(PrefixStore("gloo/", store), self.rank(), self.size(), self.timeout, names)
        self._unconnected = None
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = self.timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), self.rank(), self.size(), settings)
            self._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":  # a search for NCCL, which connect() would have registered, must not connect
            self.connect()
        return super()._get_backend(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later operations wait for a rank."""
        super().set_timeout(timeout)
        self.timeout = timeout

    def _allreduce_elsewhere(self, tensors: Any, options: Any) -> Any:
        """Delegate the all-reduce of CUDA, sparse and other tensors that are not native."""
        if tensors[0].is_sparse and tensors[0].is_cuda:
            self._runner.drain()
            return super().allreduce(tensors, options)  # Python cannot call NCCL's sparse all-reduce directly
        return self._backend_for(tensors[0]).allreduce(tensors, options)

    allgather_coalesced = _delegated("allgather_coalesced")
    gather_single = gather_into_tensor = _delegated("gather_single")  # the names that torch 2.15 calls
    reduce = _delegated("reduce", needs_contiguous=True)
    gather = _delegated("gather", needs_contiguous=True)
    scatter = _delegated("scatter", needs_contiguous=True)
    alltoall = _delegated("alltoall", needs_contiguous=True)

    def alltoall_base(  # type: ignore[override]
        self, output: Any, tensor: Any, *arguments: Any, **options: Any
    ) -> Any:
        """Delegate ``all_to_all_single``."""
        for name, rows, sizes in zip(("output", "input"), (output, tensor), arguments, strict=False):
            if not sizes and rows.dim() and rows.shape[0] % self.size():
                raise UsageError(
                    f"rank {self.rank()}: the {name} of all_to_all_single has {rows.shape[0]} rows, which "
                    f"is not divisible by {self.size()} ranks; give {name}_split_sizes"
                )
        return self._backend_for_contiguous([tensor, output]).alltoall_base(output, tensor, *arguments, **options)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def send(self, tensors: Any, *place: Any) -> Any:
        """Send, without waiting for earlier operations."""
        return self._get_backend(tensors[0].device).send(tensors, *place)

    def recv(self, tensors: Any, *place: Any) -> Any:
        """Receive, without waiting for earlier operations."""
        return self._get_backend(tensors[0].device).recv(tensors, *place)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """Receive from any rank, without waiting for earlier operations."""
        return self._get_backend(tensors[0].device).recv_anysource(tensors, tag)

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """Reject ``dist.split_group``, which torch 2.15 also calls for groups without a device."""
        raise UsageError(
            f"rank {self.rank()}: a process group of the paceline backend cannot be split; call "
            "dist.new_group(ranks) on all ranks"
        )

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        """Reject merging groups, just as :meth:`split_group` rejects splitting one."""
        raise UsageError(
            f"rank {self.rank()}: a process group of the paceline backend cannot be merged; call "
            "dist.new_group(ranks) with the ranks of both groups"
        )

    def register_pre_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Reject torch 2.15's hooks, which C++ calls only around its own collectives."""
        raise UsageError(f"rank {self.rank()}: the paceline backend has no hooks around collectives; use 'gloo'")

    register_post_hook = register_pre_hook

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        """Delegate to Gloo; ``dist.monitored_barrier`` refuses every backend that is not called ``gloo``."""
        self._runner.drain()
        self.connect()
        return super().monitored_barrier(  # type: ignore[misc]
            *arguments, **options
        )

    def _backend_for(self, tensor: torch.Tensor) -> Any:
        """Return the backend for the device of `tensor`, after waiting for this rank's native collectives.

        Collectives are called on the backend and not through ``super()``, because torch would hold the GIL there: a
        Gloo thread that releases a tensor takes the GIL while it holds the lock of the queue that the collective needs.
        """
        self._runner.drain()
        return self._get_backend(tensor.device)

    def _backend_for_contiguous(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the backend for the device of `tensors`."""
        for tensor in tensors:
            if tensor.device.type == "cpu" and not tensor.is_contiguous():
                raise UsageError(
                    f"rank {self.rank()}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} was "
                    "passed to a collective of Gloo, which needs contiguous tensors; pass tensor.contiguous()"
                )
        return self._backend_for(tensors[0])

    def shutdown(self) -> None:
        """Close the group. This has no effect in a forked child, which released it at the fork."""
        if self._close():
            super().shutdown()

    def abort(self) -> None:
        """Close the group without waiting for NCCL's pending work."""
        if self._close():
            super().abort()

    def _close(self) -> bool:
        """Close everything except Gloo and NCCL; return whether this process created the group."""
        if not self._runner.is_ours:
            return False
        self._runner.close()
        self._close_native()
        return True

    def end_thread(self) -> None:
        """End the thread when the process ends.

        A thread that returns from a torch operator during interpreter shutdown cannot take the GIL. It would be unwound
        through C++ code that does not allow exceptions, which aborts the process.
        """
        if self._runner.is_ours:
            self._runner.close(_LEAVE_S, interrupt=self._close_native)  # it may wait for a rank that never arrives

    def _close_native(self) -> None:
        """Close the native engine."""


@cache
def _groups() -> WeakSet[Delegating]:
    """Return the groups of this process. Their threads must end before the interpreter does."""
    groups: WeakSet[Delegating] = WeakSet()
    atexit.register(_end_threads, groups)
    return groups


def _end_threads(groups: WeakSet[Delegating]) -> None:
    for group in list(groups):
        group.end_thread()
