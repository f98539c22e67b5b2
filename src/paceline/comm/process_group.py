"""The ``"paceline"`` backend of torch.distributed: collectives of one host through shared memory.

``dist.init_process_group("paceline")`` after ``import paceline``. What training uses is native for CPU tensors; the
rest goes to Gloo, CUDA tensors to NCCL. ``docs/backend.md`` has the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceScatterOptions,
    Store,
)
from torch.distributed import ReduceOp

from paceline.comm.arithmetic import supports
from paceline.comm.collectives import Collectives, Note
from paceline.comm.engine import DTYPES, Engine, Operation
from paceline.comm.handshake import Refused, agree_on_hosts, connect
from paceline.comm.shared_memory import Arena
from paceline.comm.work import Handle, Runner

NAME = "paceline"


class PacelineProcessGroup(dist.ProcessGroup):
    """A process group whose CPU collectives run through shared memory where all ranks are on one host.

    A method that is overridden here is native; every other one is Gloo's, in C++. Where shared memory cannot be
    used, all of them are, and a warning says why.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, settings)
            self._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
        self.timeout = timeout
        self._runner = Runner(f"paceline rank {rank}")
        self._engine = _make_engine(PrefixStore("paceline/", store), rank, size, timeout)
        self._collectives = Collectives(self._engine) if self._engine is not None else None

    @property
    def native(self) -> bool:
        """Whether collectives run through shared memory."""
        return self._collectives is not None

    def getBackendName(self) -> str:
        """The backend's name, as torch asks for it."""
        return NAME

    # -- shared memory, for the reducer -------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor of `numel` elements in shared memory, which collectives use where it lies.

        Raises:
            UsageError: if the host has not that much memory, or the group does not use shared memory.
        """
        return self._whole_engine().arena.allocate(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in this rank's shared memory."""
        return self._whole_engine().arena.offset_of(tensor) is not None

    def free(self, tensor: Tensor) -> None:
        """Give back what :meth:`allocate` gave."""
        self._whole_engine().arena.free(tensor)

    def launch_all_reduce(
        self, tensor: Tensor, note: Note | None = None, factor: Callable[[Sequence[Note]], float] | None = None
    ) -> Operation:
        """Begin the sum of `tensor`, which :meth:`allocate` gave, times `factor` of all ranks' notes.

        No thread works on it: :meth:`progress` carries it on, :meth:`finish` waits.
        """
        return self._native.post_all_reduce(tensor, ReduceOp.SUM, None, note, factor)

    def progress(self) -> None:
        """Take launched operations as far as they go now, without waiting."""
        self._whole_engine().progress()

    def finish(self, operation: Operation) -> None:
        """Wait for a launched operation."""
        self._whole_engine().wait(operation)

    def _whole_engine(self) -> Engine:
        assert self._engine is not None, "this group does not use shared memory"
        return self._engine

    # -- c10d ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Native for one CPU tensor and the reductions that :func:`arithmetic.supports` names."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        options = _options(AllreduceOptions, opts, reduce=True)
        op = _reduction(options.reduceOp)
        if not self._is_native(tensors) or op is None or not supports(op, tensors[0].dtype):
            return super().allreduce(tensors, options)

        def run() -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    self._native.all_reduce(flat, op)

        return self._submit(run, tensors, options)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Several all-reduces, one after the other."""
        options = _options(AllreduceCoalescedOptions, opts)
        op = _reduction(options.reduceOp)
        if op is None or not all(self._is_native([one]) and supports(op, one.dtype) for one in tensors):
            return super().allreduce_coalesced(tensors, options)
        plain = AllreduceOptions()
        plain.reduceOp, plain.asyncOp = options.reduceOp, options.asyncOp
        return self.allreduce(tensors, plain)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, opts: Any = None, root: int | None = None
    ) -> Any:
        """Native for CPU tensors."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        options = _options(BroadcastOptions, opts)
        if root is not None:
            options.rootRank = root
        if not self._is_native(tensors):
            return super().broadcast(tensors, options)

        def run() -> None:
            with _Flat(tensors[0]) as flat:
                self._native.broadcast(flat, options.rootRank)

        return self._submit(run, tensors, options)

    def allgather(self, outputs: Any, tensors: Any = None, opts: Any = None) -> Any:
        """Native for equal CPU tensors; uneven ones are Gloo's."""
        options = _options(AllgatherOptions, opts)
        given, wanted = tensors[0], outputs[0]
        even = all(output.shape == given.shape and output.dtype == given.dtype for output in wanted)
        if not even or not self._is_native([given]):
            return super().allgather(outputs, tensors, options)

        def run() -> None:
            flats = [output if output.is_contiguous() else torch.empty_like(given).contiguous() for output in wanted]
            self._native.all_gather([flat.view(-1) for flat in flats], given.contiguous().view(-1))
            for output, flat in zip(wanted, flats, strict=True):
                if output is not flat:
                    output.copy_(flat)

        return self._submit(run, wanted, options)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """``all_gather_into_tensor``."""
        options = _options(AllgatherOptions, opts)
        if not self._is_native([tensor]) or output.numel() != tensor.numel() * self.size():
            return super()._allgather_base(output, tensor, options)

        def run() -> None:
            with _Flat(output, read=False) as flat:
                self._native.all_gather(flat.chunk(self.size()), tensor.contiguous().view(-1))

        return self._submit(run, [output], options)

    def reduce_scatter(self, outputs: Any, inputs: Any = None, opts: Any = None) -> Any:  # type: ignore[override]
        """Native for equal CPU tensors."""
        options = _options(ReduceScatterOptions, opts)
        output, given = outputs[0], inputs[0]
        op = _reduction(options.reduceOp)
        even = all(one.numel() == output.numel() for one in given)
        if not even or not self._is_native([output]) or op is None or not supports(op, output.dtype):
            return super().reduce_scatter(outputs, inputs, options)

        def run() -> None:
            with _Flat(output, read=False) as flat:
                self._native.reduce_scatter(flat, [one.contiguous().view(-1) for one in given], op)

        return self._submit(run, outputs, options)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """``reduce_scatter_tensor``."""
        options = _options(ReduceScatterOptions, opts)
        op = _reduction(options.reduceOp)
        even = tensor.numel() == output.numel() * self.size()
        if not even or not self._is_native([output]) or op is None or not supports(op, output.dtype):
            return super()._reduce_scatter_base(output, tensor, options)
        return self.reduce_scatter([output], [list(tensor.contiguous().view(-1).chunk(self.size()))], options)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several ``all_gather_into_tensor``, one after the other."""
        works = [self._allgather_base(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Several ``reduce_scatter_tensor``, one after the other."""
        works = [self._reduce_scatter_base(out, given, opts) for out, given in zip(outputs, inputs, strict=True)]
        return works[-1]

    def barrier(self, opts: Any = None) -> Any:
        """Native unless devices are named."""
        options = _options(BarrierOptions, opts)
        if self._collectives is None:
            return super().barrier(options)
        return self._submit(self._native.barrier, [], options)

    def shutdown(self) -> None:
        """Called when the group is destroyed."""
        self._runner.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = self._collectives = None
        super().shutdown()

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _native(self) -> Collectives:
        assert self._collectives is not None
        return self._collectives

    def _is_native(self, tensors: Sequence[Tensor]) -> bool:
        return self._collectives is not None and all(
            tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype in DTYPES
            for tensor in tensors
        )

    def _submit(self, run: Any, result: Sequence[Tensor], options: Any) -> Handle:
        with torch.no_grad():
            return self._runner.submit(torch.no_grad()(run), result, asynchronous=options.asyncOp)


class _Flat:
    """A tensor as a flat contiguous one; what is written to that is written to the tensor at the end."""

    def __init__(self, tensor: Tensor, *, read: bool = True) -> None:
        self._tensor = tensor.detach()
        contiguous = self._tensor.is_contiguous()
        fresh = self._tensor.contiguous() if read else torch.empty_like(self._tensor).contiguous()
        self._flat = self._tensor if contiguous else fresh

    def __enter__(self) -> Tensor:
        return self._flat.view(-1)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._flat is not self._tensor:
            self._tensor.copy_(self._flat)


def _options(kind: Any, given: Any, *, reduce: bool = False) -> Any:
    """c10d's options object; callers in C++ and Python give it, an operation, or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if reduce and given is not None:
        options.reduceOp = given
    options.asyncOp = True
    return options


def _reduction(op: Any) -> ReduceOp.RedOpType | None:
    """The plain reduction in c10d's object; None for one with a factor."""
    for kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        if op == kind:
            return kind
    for kind in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        if op == kind:
            return kind
    return None


def _make_engine(store: Store, rank: int, size: int, timeout: timedelta) -> Engine | None:
    """The engine, or None where shared memory cannot be used; then one warning on rank 0 says why."""
    try:
        hosts = agree_on_hosts(store, rank, size, timeout)
        if len(set(hosts)) > 1:
            raise Refused(f"the ranks are on {len(set(hosts))} hosts")
    except Refused as refused:
        if rank == 0:
            warnings.warn(f"the process group uses Gloo, not shared memory: {refused}", stacklevel=2)
        return None
    arena = Arena()
    peers = connect(store, rank, [other for other in range(size) if other != rank], arena, timeout)
    return Engine(arena, peers, rank, timeout)


def _create(options: Any, _backend_options: Any = None) -> PacelineProcessGroup:
    """What torch calls for ``init_process_group("paceline")`` and ``new_group``."""
    return PacelineProcessGroup(options.store, options.group_rank, options.group_size, options.timeout)


def register() -> None:
    """Make the backend's name known to torch. Harmless when it is known already."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
