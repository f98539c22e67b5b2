"""The ``"paceline"`` backend of torch.distributed: collectives through shared memory among the ranks of a host.

Call ``dist.init_process_group("paceline")`` after ``import paceline``. The backend implements the collectives used in
training for CPU tensors. It leaves the other CPU collectives to Gloo, and CUDA tensors to NCCL. ``docs/backend.md``
lists the collectives.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ReduceOp,
    ReduceScatterOptions,
    Store,
)

from paceline.comm.arithmetic import REDUCTIONS, supports
from paceline.comm.board import Board
from paceline.comm.forking import keep_in_children
from paceline.comm.gloo import connect_gloo
from paceline.comm.open_native import agree_to_share, open_engine
from paceline.comm.operation_header import DTYPES
from paceline.comm.shm_collectives import SMALL_BYTES, Collectives
from paceline.comm.shm_engine import Operation
from paceline.comm.work import Handle, Runner, last_of
from paceline.core import OWN_BACKEND
from paceline.core.stores import connecting, store_of_group
from paceline.core.torch_distributed import AllgatherOptions
from paceline.core.torch_internals import class_never_compiled, tree_leaves
from paceline.errors import UsageError

_LEAVE_S = 0.5
"""Seconds to wait at exit for operations under way before giving up on other ranks."""


def create(
    store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int], *, delegates: bool
) -> PacelineProcessGroup:
    """Create a group, in a part of `store`. Error messages call its rank r ``names[r]``."""
    place = store_of_group(store, rank, size, timeout, names)
    return PacelineProcessGroup(place, rank, size, timeout, names, delegates=delegates)


def _delegated(name: str, *, needs_contiguous: bool = False) -> Any:
    """Return a method that passes the collective `name` on to Gloo or NCCL."""

    def collective(group: PacelineProcessGroup, *arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        backend = group._backend_for_contiguous(tensors) if needs_contiguous else group._backend_for(tensors[0])
        return getattr(backend, name)(*arguments)

    return collective


def _refused(reason: str) -> Any:
    """Return a method that raises a UsageError with the `reason`."""

    def refuse(group: PacelineProcessGroup, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"rank {group.rank()}: a process group of the paceline backend {reason}")

    return refuse


@class_never_compiled
class PacelineProcessGroup(dist.ProcessGroup):
    """A process group whose CPU collectives run through shared memory among the ranks of a host.

    The other collectives are delegated to Gloo, and to NCCL for CUDA tensors. If the ranks are on several hosts, or
    cannot use shared memory, all collectives are delegated, and a warning gives the reason.

    A delegated collective first waits for this rank's earlier native ones, to keep the order of operations. Sends and
    receives do not wait, because the other rank may not have called those collectives yet.

    If the group is not connected yet, its first delegated operation calls :meth:`connect`, and all ranks must take part
    in that operation.
    """

    # -- construction -------------------------------------------------------------------------------------------

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        names: Sequence[int] | None = None,
        *,
        delegates: bool = True,
    ) -> None:
        """Let the ranks share memory, and connect Gloo and NCCL.

        Error messages call rank r of the group ``names[r]``, by default r. Without `delegates`, a group that shares
        memory and has no GPU connects Gloo only when an operation needs it.
        """
        names, native_store = names or range(size), PrefixStore("paceline/", store)
        with connecting(store, rank, size, timeout, names):
            shared = agree_to_share(native_store, rank, size, timeout, names)
            super().__init__(rank, size)  # type: ignore[call-arg]
            self._set_default_backend(ProcessGroup.BackendType.GLOO)
            self._unconnected: tuple[Store, Sequence[int]] | None = (store, names)
            self.timeout = timeout
            self._runner = Runner(f"paceline rank {rank}")
            keep_in_children(self)
            _groups().add(self)
            self._collectives: Collectives | None = None
            self._why_gloo = "this group does not use shared memory; see the warning for the reason"
            if shared:
                self._collectives = Collectives(open_engine(native_store, rank, size, timeout, names))
                runner = weakref.ref(self._runner)  # which refers to the engine
                self._collectives.engine.is_idle = lambda: (alive := runner()) is None or alive.is_idle()
            if delegates or not shared or torch.cuda.is_available():
                self._connect(store, names)

    own_name: str = ""
    """Name of a group that torch does not know. torch keeps a group's name in its backends, which may not exist yet."""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The group's name."""
        return self.own_name or super().group_name

    def getBackendName(self) -> str:
        """Return the backend's name, for torch."""
        return OWN_BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later operations wait for a rank."""
        super().set_timeout(timeout)
        self.timeout = timeout
        if self._collectives is not None:
            self._collectives.engine.timeout = timeout

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

    # -- launched by the reducer: shared memory, and reductions that need no thread -----------------------------

    @property
    def native(self) -> bool:
        """Whether all ranks are on one host and share memory. Required by :meth:`launch_all_reduce`."""
        return self._collectives is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed flat tensor of `numel` elements in shared memory, which collectives use without a copy."""
        return self._native.engine.arena.allocate(numel, dtype)

    small_bytes = SMALL_BYTES
    """Size of the largest tensor for which :meth:`launch_own_sum` is the fastest."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in this rank's shared memory."""
        return self._native.engine.arena.offset_of(tensor) is not None

    def free(self, tensor: Tensor) -> None:
        """Free a tensor that :meth:`allocate` returned."""
        self._native.engine.arena.free(tensor)

    def launch_all_reduce(self, tensor: Tensor) -> Operation:
        """Begin the in-place sum of `tensor`, which must come from :meth:`allocate`."""
        return self._native.post_all_reduce(tensor)

    def launch_gather(self, tensor: Tensor, places: Sequence[Sequence[tuple[Tensor, slice]]]) -> Operation:
        """Begin to copy elements of the other ranks' `tensor`, from :meth:`allocate`, to `places`.

        For each rank, `places` lists the tensors to copy into, each with the slice of that rank's `tensor` to copy.
        """
        return self._native.post_gather(tensor, places)

    def progress(self) -> None:
        """Advance launched operations as far as possible without waiting."""
        self._native.engine.progress()

    @cached_property
    def board(self) -> Board:
        """The ranks' reports of each step."""
        return Board(self._native.engine)

    def launch_own_sum(self, tensor: Tensor) -> Operation:
        """Begin the in-place sum of a flat `tensor` in any memory, which each rank computes for itself.

        The sum is complete once every rank has launched it, without waiting for other ranks' results.
        """
        return self._native.post_own_sum(tensor)

    @property
    def _native(self) -> Collectives:
        if self._collectives is None:
            raise UsageError(f"rank {self.rank()}: {self._why_gloo}")
        return self._collectives

    # -- collectives in shared memory ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """All-reduce; native for one CPU tensor and the reductions that :func:`arithmetic.supports` accepts."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        options = options_of(AllreduceOptions, opts, reduce=True)
        op = reduction_of(options.reduceOp)
        if not self._is_native(tensors) or op is None or not supports(op, tensors[0].dtype):
            if tensors[0].is_sparse and tensors[0].is_cuda:
                self._runner.drain()
                return super().allreduce(tensors, options)  # Python cannot call NCCL's sparse all-reduce directly
            return self._backend_for(tensors[0]).allreduce(tensors, options)
        if len(tensors) == 1 and (launched := self._launch_small(tensors[0], op)) is not None:
            # Not wait(), which would raise the error: callers expect the error in the handle, as with submit().
            if not options.asyncOp:
                launched.join()
            return launched

        def run() -> None:
            for tensor in tensors:
                with Flat(tensor) as flat:
                    self._native.all_reduce(flat, op)

        return self._submit(run, tensors, options)

    def _launch_small(self, tensor: Tensor, op: ReduceOp.RedOpType) -> Handle | None:
        """Launch a small all-reduce without the thread, which is slower; return None if that is impossible."""
        if tensor.nbytes > SMALL_BYTES or not tensor.is_contiguous() or tensor.is_inference():
            return None
        flat = tensor.detach().view(-1)
        # Not for inference tensors: any thread may write the result, and only _submit() sets the mode for that.
        return self._runner.launch(lambda: self._native.post_small(flat, op), [tensor])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce several tensors, one after the other."""
        options = options_of(AllreduceCoalescedOptions, opts)
        op = reduction_of(options.reduceOp)
        if op is None or not all(self._is_native([tensor]) and supports(op, tensor.dtype) for tensor in tensors):
            return self._backend_for(tensors[0]).allreduce_coalesced(tensors, options)
        plain = AllreduceOptions()
        plain.reduceOp, plain.asyncOp = options.reduceOp, options.asyncOp
        return self.allreduce(tensors, plain)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, root: int | None = None
    ) -> Any:
        """Broadcast; native for CPU tensors."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        options = options_of(BroadcastOptions, opts)
        if root is not None:
            options.rootRank = root
        if not 0 <= options.rootRank < self.size():
            raise UsageError(
                f"rank {self.rank()}: broadcast from rank {options.rootRank} of a group of {self.size()}; "
                f"give one from 0 to {self.size() - 1}"
            )
        if not self._is_native(tensors):
            return self._backend_for(tensors[0]).broadcast(tensors, options)

        def run() -> None:
            with Flat(tensors[0]) as flat:
                self._native.broadcast(flat, options.rootRank)

        return self._submit(run, tensors, options)

    def allgather(self, outputs: Any, tensors: Any = None, opts: Any = None) -> Any:
        """All-gather; native for CPU tensors."""
        options = options_of(AllgatherOptions, opts)
        tensor, targets = tensors[0], outputs[0]
        if not self._is_native([tensor, *targets]) or any(output.dtype != tensor.dtype for output in targets):
            return self._backend_for(tensor).allgather(outputs, tensors, options)
        if len(targets) != self.size() or any(output.numel() != tensor.numel() for output in targets):
            raise UsageError(
                f"rank {self.rank()}: all_gather of a tensor of {tensor.numel()} elements into tensors of "
                f"{[output.numel() for output in targets]}; give {self.size()} of the same size"
            )

        def run() -> None:
            with ExitStack() as stack:
                flats = [stack.enter_context(Flat(output, read=False)) for output in targets]
                self._native.all_gather(flats, tensor.contiguous().view(-1))

        handle = self._submit(run, targets, options)
        # torch's quantization hooks rely on this value, which NCCL's future has and Gloo's does not. The operation may
        # already be running, but only a future reads the value, and none exists before this method returns.
        handle.value = lambda: [torch.stack(targets)]
        return handle

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """All-gather into one tensor: ``all_gather_into_tensor``."""
        options = options_of(AllgatherOptions, opts)
        even = output.numel() == tensor.numel() * self.size() and output.dtype == tensor.dtype
        if not even or not self._is_native([tensor, output]):
            return self._backend_for(tensor)._allgather_base(output, tensor, options)

        def run() -> None:
            with Flat(output, read=False) as flat:
                self._native.all_gather(flat.chunk(self.size()), tensor.contiguous().view(-1))

        return self._submit(run, [output], options)

    def reduce_scatter(self, outputs: Any, inputs: Any = None, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce-scatter; native for equal CPU tensors."""
        options = options_of(ReduceScatterOptions, opts)
        output, parts = outputs[0], inputs[0]
        op = reduction_of(options.reduceOp)
        even = len(parts) == self.size() and all(
            part.numel() == output.numel() and part.dtype == output.dtype for part in parts
        )
        if not even or not self._is_native([output, *parts]) or op is None or not supports(op, output.dtype):
            return self._backend_for(output).reduce_scatter(outputs, inputs, options)

        def run() -> None:
            with Flat(output, read=False) as flat:
                self._native.reduce_scatter(flat, [part.contiguous().view(-1) for part in parts], op)

        return self._submit(run, outputs, options)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Reduce-scatter of one tensor: ``reduce_scatter_tensor``."""
        options = options_of(ReduceScatterOptions, opts)
        op = reduction_of(options.reduceOp)
        even = tensor.numel() == output.numel() * self.size() and tensor.dtype == output.dtype
        if not even or not self._is_native([output, tensor]) or op is None or not supports(op, output.dtype):
            return self._backend_for(tensor)._reduce_scatter_base(output, tensor, options)
        return self.reduce_scatter([output], [list(tensor.contiguous().view(-1).chunk(self.size()))], options)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """All-gather into several tensors, one after the other."""
        pairs = zip(outputs, inputs, strict=True)
        return last_of([self._allgather_base(output, tensor, opts) for output, tensor in pairs])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce-scatter several tensors, one after the other."""
        pairs = zip(outputs, inputs, strict=True)
        return last_of([self._reduce_scatter_base(output, tensor, opts) for output, tensor in pairs])

    # The names that torch 2.13 calls; 2.12 and earlier call the others.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; native unless a device is specified."""
        options = options_of(BarrierOptions, opts)
        on_device = options.device_ids or (options.device is not None and options.device.type != "cpu")
        if self._collectives is None or on_device:
            self._runner.drain()
            return self._get_backend(options.device or torch.device("cpu")).barrier(options)
        return self._submit(self._native.barrier, [], options)

    def _is_native(self, tensors: Sequence[Tensor]) -> bool:
        for tensor in tensors:
            if tensor.device.type not in ("cpu", "cuda"):
                raise UsageError(
                    f"rank {self.rank()}: a tensor on device '{tensor.device}' was passed to the process group; "
                    "move it to 'cpu' or 'cuda'"
                )
        return self._collectives is not None and all(
            tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype in DTYPES
            for tensor in tensors
        )

    def _submit(self, run: Any, result: Sequence[Tensor], options: Any) -> Handle:
        # Writing to inference tensors outside inference mode raises, even in the runner's thread.
        inference = any(tensor.is_inference() for tensor in result if isinstance(tensor, Tensor))
        mode = torch.inference_mode() if inference else torch.no_grad()

        def run_in_mode() -> None:
            with mode:
                run()

        return self._runner.submit(run_in_mode, result, asynchronous=options.asyncOp)

    # -- collectives of Gloo and NCCL ---------------------------------------------------------------------------

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

    split_group = _refused("cannot be split; call dist.new_group(ranks) on all ranks")
    merge_remote_group = _refused("cannot be merged; call dist.new_group(ranks) with the ranks of both groups")
    # torch 2.15's hooks, which C++ calls only around its own collectives.
    register_pre_hook = register_post_hook = _refused("has no hooks around collectives; use 'gloo'")

    def monitored_barrier(self, *arguments: Any, **options: Any) -> Any:
        """Delegate to Gloo; ``dist.monitored_barrier`` refuses every backend that is not called ``gloo``."""
        self._runner.drain()
        self.connect()
        return super().monitored_barrier(  # type: ignore[misc]
            *arguments, **options
        )

    def _backend_for(self, tensor: Tensor) -> Any:
        """Return the backend for the device of `tensor`, after waiting for this rank's native collectives.

        Collectives are called on the backend and not through ``super()``, because torch would hold the GIL there: a
        Gloo thread that releases a tensor takes the GIL while it holds the lock of the queue that the collective needs.
        """
        self._runner.drain()
        return self._get_backend(tensor.device)

    def _backend_for_contiguous(self, tensors: Sequence[Tensor]) -> Any:
        """Return the backend for the device of `tensors`."""
        for tensor in tensors:
            if tensor.device.type == "cpu" and not tensor.is_contiguous():
                raise UsageError(
                    f"rank {self.rank()}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} was "
                    "passed to a collective of Gloo, which needs contiguous tensors; pass tensor.contiguous()"
                )
        return self._backend_for(tensors[0])

    # -- the end ------------------------------------------------------------------------------------------------

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
        if self._collectives is not None:
            self._collectives.engine.close()
            self._collectives = None
            self._why_gloo = "this process group was destroyed; create a new one and wrap the model again"


class Flat:
    """A flat contiguous form of a tensor; a ``with`` block writes it back to the tensor on exit."""

    def __init__(self, tensor: Tensor, *, read: bool = True) -> None:
        self._tensor = tensor.detach()
        self._is_copy = not tensor.is_contiguous()
        flat = self._tensor
        if self._is_copy:
            flat = flat.contiguous() if read else torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
        self._flat = flat.view(-1)

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._is_copy:
            self._tensor.copy_(self._flat.view(self._tensor.shape))


def options_of(options_class: Any, argument: Any, *, reduce: bool = False) -> Any:
    """Return c10d's options object. C++ passes one; Python callers may pass a reduction or None."""
    if isinstance(argument, options_class):
        return argument
    options = options_class()
    if reduce and argument is not None:
        options.reduceOp = argument
    options.asyncOp = True
    return options


def reduction_of(op: Any) -> ReduceOp.RedOpType | None:
    """Return the plain reduction of c10d's object; None if it has a factor."""
    return next((plain for plain in REDUCTIONS if op == plain), None)


@cache
def _groups() -> weakref.WeakSet[PacelineProcessGroup]:
    """Return the groups of this process. Their threads must end before the interpreter does."""
    groups: weakref.WeakSet[PacelineProcessGroup] = weakref.WeakSet()
    atexit.register(_end_threads, groups)
    return groups


def _end_threads(groups: weakref.WeakSet[PacelineProcessGroup]) -> None:
    for group in list(groups):
        group.end_thread()
