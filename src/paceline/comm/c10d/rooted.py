"""The collectives with a root, and all-to-all, as c10d calls them: native among ranks of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.arithmetic import supports
from paceline.comm.c10d.delegating import Delegating
from paceline.comm.c10d.operands import Flat, options_of, reduction_of
from paceline.comm.shm.collectives import Collectives
from paceline.errors import UsageError
from paceline.torch_internals.c10d import AllToAllOptions, GatherOptions, ReduceOptions, ScatterOptions
from paceline.torch_internals.compile import class_never_compiled

if TYPE_CHECKING:
    from paceline.comm.c10d.work import Handle
    from paceline.comm.multi_host import Hierarchy


@class_never_compiled
class Exchanging(Delegating):
    """Adds reduce, gather, scatter and all-to-all; among ranks of several hosts they stay Gloo's."""

    _collectives: Collectives | Hierarchy | None

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        """Reduce; native for one CPU tensor and the reductions that :func:`arithmetic.supports` names."""
        options = options_of(ReduceOptions, opts)
        op, host = reduction_of(options.reduceOp), self._host_for(tensors)
        if host is None or op is None or not supports(op, tensors[0].dtype):
            return super().reduce(tensors, options, *rest)
        root = self._root(options)

        def run() -> None:
            with Flat(tensors[0]) as flat:
                host.reduce(flat, op, root)

        return self._submit(run, tensors, options)

    def gather(self, outputs: Any, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        """Gather; native for CPU tensors of equal shape."""
        options = options_of(GatherOptions, opts)
        root = self._root(options)
        targets = list(outputs[0]) if outputs and self.rank() == root else []
        host = self._host_for([*tensors, *targets])
        if host is None:
            return super().gather(outputs, tensors, options, *rest)
        if self.rank() == root:
            self._expect_equal("gather", targets, tensors[0])

        def run() -> None:
            flats = [Flat(output, read=False) for output in targets]
            host.gather([flat.flat for flat in flats], tensors[0].contiguous().view(-1), root)
            for flat in flats:
                flat.write_back()

        return self._submit(run, targets or tensors, options)

    def scatter(self, outputs: Any, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        """Scatter; native for CPU tensors of equal shape."""
        options = options_of(ScatterOptions, opts)
        root = self._root(options)
        parts = list(tensors[0]) if tensors and self.rank() == root else []
        host = self._host_for([*outputs, *parts])
        if host is None:
            return super().scatter(outputs, tensors, options, *rest)
        if self.rank() == root:
            self._expect_equal("scatter", parts, outputs[0])

        def run() -> None:
            with Flat(outputs[0], read=False) as flat:
                host.scatter(flat, [part.contiguous().view(-1) for part in parts], root)

        return self._submit(run, outputs, options)

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        """``all_to_all``: native for CPU tensors of one dtype, of any shapes."""
        options = options_of(AllToAllOptions, opts)
        host = self._host_for([*outputs, *tensors])
        if host is None:
            return super().alltoall(outputs, tensors, options, *rest)
        if not len(outputs) == len(tensors) == self.size():
            raise UsageError(
                f"rank {self.rank()}: all_to_all of {len(tensors)} tensors into {len(outputs)} in a group of "
                f"{self.size()}; give one for each rank"
            )

        def run() -> None:
            flats = [Flat(output, read=False) for output in outputs]
            host.all_to_all([flat.flat for flat in flats], [tensor.contiguous().view(-1) for tensor in tensors])
            for flat in flats:
                flat.write_back()

        return self._submit(run, outputs, options)

    def alltoall_base(
        self, output: Any, tensor: Any, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> Any:
        """``all_to_all_single``: native for CPU tensors of one dtype, cut along the first dimension."""
        options = options_of(AllToAllOptions, opts)
        host = self._host_for([output, tensor])
        if host is None:
            return super().alltoall_base(output, tensor, output_splits or [], input_splits or [], options)
        cuts = self._cut(tensor, input_splits, "input"), self._cut(output, output_splits, "output")

        def run() -> None:
            with Flat(output, read=False) as flat:
                host.all_to_all(list(flat.split(cuts[1])), list(tensor.contiguous().view(-1).split(cuts[0])))

        return self._submit(run, [output], options)

    all_to_all_single = alltoall_base

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_native(self, tensors: Sequence[Tensor]) -> bool:
        raise NotImplementedError

    def _submit(self, run: Callable[[], None], result: Sequence[Tensor], options: Any) -> Handle:
        raise NotImplementedError

    def _host_for(self, tensors: Sequence[Tensor]) -> Collectives | None:
        """Return the collectives of this host, if there is no other and they take these tensors."""
        if not isinstance(self._collectives, Collectives) or not tensors or not self._is_native(tensors):
            return None
        return self._collectives if len({tensor.dtype for tensor in tensors}) == 1 else None

    def _root(self, options: Any) -> int:
        root: int = options.rootRank
        if not 0 <= root < self.size():
            raise UsageError(
                f"rank {self.rank()}: rank {root} is the root in a group of {self.size()}; give one from 0 to "
                f"{self.size() - 1}"
            )
        return root

    def _expect_equal(self, name: str, at_root: Sequence[Tensor], single: Tensor) -> None:
        counts = [tensor.numel() for tensor in at_root]
        if counts != [single.numel()] * self.size():
            raise UsageError(
                f"rank {self.rank()}: {name} with tensors of {counts} elements at the root and one of "
                f"{single.numel()}; give {self.size()} tensors of equal shape"
            )

    def _cut(self, tensor: Tensor, splits: Sequence[int] | None, side: str) -> list[int]:
        """Return the number of elements in each rank's part of `tensor`."""
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self.size():
                raise UsageError(
                    f"rank {self.rank()}: the {side} of all_to_all_single has {rows} rows, which {self.size()} ranks "
                    f"cannot share equally; give {side}_split_sizes"
                )
            return [rows // self.size() * row] * self.size()
        if len(splits) != self.size() or sum(splits) != rows or min(splits) < 0:
            raise UsageError(
                f"rank {self.rank()}: {side}_split_sizes {list(splits)} do not cut {rows} rows into {self.size()} "
                "parts; give one size for each rank"
            )
        return [split * row for split in splits]
