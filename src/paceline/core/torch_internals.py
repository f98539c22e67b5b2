"""The private names of torch that Paceline uses, except in :mod:`.torch_distributed` and :mod:`.torch_elastic`.

No other module uses a private name, so a new version of torch can break only these three. In order: lists of tensors,
the memory and contents of one tensor, autograd, ``torch.compile``, the profiler, and the ``DataLoader``. Each name has
a contract test, ``tests/unit/core/test_torch_internals.py``, which fails if a release changes it.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, FunctionType
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.autograd.profiler as profiler
import torch.utils.data
import torch.utils.data.dataloader
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.amp.grad_scaler import GradScaler, OptState
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # intercepts every operator
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.hooks import RemovableHandle

from paceline.core.stacks import readable_stacks
from paceline.errors import UsageError

# -- lists of tensors --------------------------------------------------------------------------------------------------

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
copy_each: Callable[[Tensors, Tensors], None] = torch._foreach_copy_
"""Copies each tensor in the second list to the tensor at the same index in the first list. These names refer to torch's
functions directly, without a wrapper, because every bucket uses them in every step."""
multiply_each: Callable[[Tensors, float], object] = torch._foreach_mul_
"""Multiplies each tensor by a number, in place."""
add_each: Callable[[Tensors, Tensors], object] = torch._foreach_add_
"""Adds each tensor in the second list to the tensor at the same index in the first list, in place."""
mix_each: Callable[[Tensors, Tensors, float], object] = torch._foreach_lerp_
"""Moves each tensor in the first list toward the tensor at the same index in the second list (``lerp``), in place."""
zero_each: Callable[[Tensors], object] = torch._foreach_zero_
"""Fills each tensor with zeros."""
LARGE = 2**20
"""Minimum size of a tensor for which a separate operation on a GPU costs less than another pass over the tensor."""


def copy_scaled(targets: Tensors, sources: Tensors, factor: float) -> None:
    """Copy each of `sources`, times `factor`, to the target at the same index."""
    if factor == 1.0:
        copy_each(targets, sources)
        return
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.numel() >= LARGE and source.dtype is target.dtype and source.shape == target.shape:
            torch.mul(source, factor, out=target)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        copy_each(*small)
        multiply_each(small[0], factor)


def norm_each(tensors: Tensors) -> Tensors:
    """Return the largest absolute value in each of the nonempty `tensors`; NaN if a tensor contains NaN."""
    reals = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    return torch._foreach_norm(reals, math.inf)


# -- one tensor --------------------------------------------------------------------------------------------------------


def address_of(storage: torch.UntypedStorage) -> int:
    """Return torch's own address of `storage`, which is valid as long as the storage exists."""
    return int(storage._cdata)


count_each: Callable[[int], int] = torch._C._storage_Use_Count
"""Counts the tensors and storages that refer to the memory of the storage with this :func:`address_of`."""


def count_uses(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages refer to the memory of `storage`, including itself."""
    return count_each(storage._cdata)


def has_overlap(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` certainly share memory, for example after ``expand``."""
    return torch._debug_has_internal_overlap(tensor) == 1


def has_elements(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` can be read like those of a dense tensor; quantized weights refuse."""
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    try:  # with none of the elements of a subclass, so that nothing is copied
        read = tensor if type(tensor) in (Tensor, nn.Parameter) else torch.cat([tensor.detach().reshape(-1)[:0]])
        return type(read).__torch_dispatch__ is Tensor.__torch_dispatch__
    except Exception:
        return False


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is ordinary and strided: not a subclass, quantized, on ``meta``, or lazily conjugated."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()


def stored_elements(gradient: Tensor) -> Tensor:
    """Return the elements that a gradient stores: all of a dense one, the values of a sparse one."""
    return gradient._values() if gradient.is_sparse else gradient


def has_nonzero(gradient: Tensor) -> bool:
    """Return whether an element is nonzero; waits for the device."""
    return bool(stored_elements(gradient).any())


def content_of(tensors: Sequence[Tensor]) -> int:
    """Return a number that changes when ``torch.utils.swap_tensors`` swaps the content of the first tensor.

    Hooks and autograd nodes move with the content. The first tensor is enough: modules swap all parameters or none.
    """
    return tensors[0]._cdata if tensors else 0


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operators that read values of tensors inside :func:`without_memory`."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Run operations without allocating memory for results; inputs may be ordinary tensors.

    Logging is disabled in the block, because torch would also log the errors of such operations.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        logging.disable(level)


# -- autograd ----------------------------------------------------------------------------------------------------------


# These names refer to C functions directly, without a wrapper, because every step calls them.
_engine = torch.autograd.Variable._execution_engine
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Turns gradients on or off until the next call; a faster ``torch.set_grad_enabled``."""
current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the running graph task, which is larger for every later task; -1 outside of a task."""
is_plain_backward: Callable[[], bool] = _engine.is_checkpoint_valid
"""Returns whether the running graph task is a ``backward()`` without ``inputs``."""
queue_callback: Callable[[Callable[[], Any]], None] = _engine.queue_callback
"""Queues a function for the end of the running graph task, after earlier ones; its result is dropped."""
exhaust: Callable[[Iterable[object]], object] = partial(deque, maxlen=0)
"""Runs an iterator such as ``map(setattr, …)`` to its end, without Python code for each item."""


class GraphTask:
    """Lives as long as a graph task of autograd, whose callbacks hold the only reference to it.

    A thread of the engine may keep a task alive briefly after ``backward()`` has raised an exception; see
    :func:`has_ended`.
    """

    def __init__(self) -> None:
        self.number = current_task()
        """Number of its graph task."""


def is_in_backward() -> bool:
    """Whether a graph task is running in this thread."""
    return current_task() != -1


def has_ended(number: int) -> bool:
    """Return whether graph task `number`, which is still referenced, has ended.

    It has ended if this thread is outside of the task and no thread waits for it. The backward pass of a reentrant
    checkpoint is inside the task that runs it.
    """
    current = current_task()
    return current != number and count_running_calls() <= (current != -1)


def count_running_calls() -> int:
    """Return how many calls of ``backward()`` and ``autograd.grad()`` are running, in all threads."""
    # Every backward() and autograd.grad() goes through this function, in torch 2.11 to 2.15.
    call: Any = torch.autograd.graph._engine_run_backward
    count = 0
    with readable_stacks():
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None:
                count += frame.f_code is call.__code__
                frame = frame.f_back
    return count


def backward_call() -> FrameType | None:
    """Return the frame of the running ``torch.autograd.backward``; on an autograd thread, search the other threads."""
    if (call_here := _innermost(sys._getframe())) is not None:
        return call_here
    with readable_stacks():
        calls_elsewhere = [call for frame in sys._current_frames().values() if (call := _innermost(frame)) is not None]
    return calls_elsewhere[0] if len(calls_elsewhere) == 1 else None


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    return frame


def comes_last(handle: RemovableHandle, kind: type) -> bool:
    """Return whether only hooks of `kind` come after the hook of `handle`; otherwise move it to the end.

    Autograd calls hooks in the order of insertion, which ``OrderedDict.move_to_end`` does not change.
    """
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "its parameter is alive"
    for number in reversed(hooks):
        if number == handle.id:
            return True
        if not isinstance(hooks[number], kind):
            break
    hooks[handle.id] = hooks.pop(handle.id)
    return False


class Accumulators:
    """The autograd nodes that accumulate into some parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._find()

    def _find(self) -> None:
        self._content = content_of(self._parameters)
        # Inference tensors have no nodes; check_averaged() refuses them.
        trained = ((i, p) for i, p in enumerate(self._parameters) if p.requires_grad and not p.is_inference())
        self._nodes = {index: _accumulate_node(parameter) for index, parameter in trained}

    def _present_nodes(self) -> dict[int, Any]:
        if content_of(self._parameters) != self._content:
            self._find()
        return self._nodes

    def are_accumulated(self) -> bool:
        """Whether the running graph task is a backward pass for these parameters, not ``autograd.grad``."""
        nodes = self._present_nodes()
        if is_plain_backward():
            # It does not matter which parameters it reaches: all of them may be hidden in reentrant checkpoints, and a
            # rank that uses none contributes zeros.
            return any(parameter.requires_grad for parameter in self._parameters)
        return _are_executed(nodes.values())

    def are_reached(self, left_out: Collection[int]) -> bool:
        """Return whether the running graph task reaches a parameter whose index is not in `left_out`."""
        return _are_executed(node for index, node in self._present_nodes().items() if index not in left_out)


def is_accumulated(parameter: Tensor) -> bool:
    """Whether the running graph task accumulates into `parameter`, rather than computing ``autograd.grad`` for it."""
    return _are_executed([_accumulate_node(parameter)])


def _are_executed(nodes: Iterable[Any]) -> bool:
    """Return whether the running graph task executes any of the `nodes`."""
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch's answer while autograd.grad runs with respect to one of these parameters
        return False


def _accumulate_node(parameter: Tensor) -> Any:
    with torch.enable_grad():
        alias: Any = parameter.expand_as(parameter)
    return alias.grad_fn.next_functions[0][0]


def have_unscaled() -> bool:
    """Return whether a ``GradScaler`` has unscaled an optimizer's gradients but the optimizer has not stepped yet.

    Unscaling changes gradients without raising their version counters. Searches all Python objects.
    """
    scalers = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), GradScaler)]
    states = [state for scaler in scalers for state in scaler._per_optimizer_states.values()]
    return any(state["stage"] is not OptState.READY for state in states)


# -- torch.compile -----------------------------------------------------------------------------------------------------

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
AnyClass = TypeVar("AnyClass", bound=type)
TorchDDP = nn.parallel.DistributedDataParallel


def never_compiled(function: AnyFunction) -> AnyFunction:
    """Keep torch.compile away from `function` and everything that it calls."""
    _mark(function, _FrameAction.SKIP)
    return function


def compiled_below(function: AnyFunction) -> AnyFunction:
    """Keep torch.compile away from `function`, but not from the functions that it calls."""
    _mark(function, _FrameAction.DEFAULT)
    return function


def class_never_compiled(kind: AnyClass) -> AnyClass:
    """Apply :func:`never_compiled` to all methods that `kind` itself defines."""
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            never_compiled(member)
    return kind


def _mark(function: Any, below: _FrameAction) -> None:
    """Mark `function`, which runs between compiled graphs, as torch marks its own.

    torch.compile would translate Paceline's hooks and collectives when they are called. The mark needs no import of
    torch._dynamo, which is slow to load, and survives ``torch._dynamo.reset()``.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, below))
    # torch.compile reads this before it traces a called function into its graph.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "Paceline runs between compiled graphs"


def leaves_graph(function: AnyFunction) -> AnyFunction:
    """Run `function` uncompiled: one compiled graph ends before it, and another begins after it."""
    return cast("AnyFunction", _disable_dynamo(function))


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the original of a `module` that ``torch.compile`` returned; None if `module` is not compiled."""
    evaluation = sys.modules.get("torch._dynamo.eval_frame")  # None if no module was compiled
    if evaluation is None or not isinstance(module, evaluation.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod
    return original


COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def check_eager_backward(rank: int) -> None:
    """Raise under compiled autograd, which calls hooks late and never calls end-of-backward callbacks."""
    autograd = sys.modules.get(COMPILED_AUTOGRAD)
    if autograd is not None and autograd.in_compiled_autograd_region:
        raise UsageError(
            f"rank {rank}: backward runs under torch's compiled autograd, which would leave gradients "
            "unaveraged; set torch._dynamo.config.compiled_autograd = False"
        )


@compiled_below
def call_module(wrapper: TorchDDP | None, module: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `module`. If it is compiled, split it into graphs at the bucket boundaries of `wrapper`, if given.

    torch's DDPOptimizer does this for the wrapper that is active during compilation. It uses the same rule as our
    buckets: starting from the last operation, a graph ends when its parameters fill a bucket.
    """
    previous, _compiling.wrapper = _compiling.wrapper, wrapper
    try:
        kind: Any = type(module)
        call = _caller(kind)
        return module(*inputs, **kwargs) if call is None else call(module, *inputs, **kwargs)
    finally:
        _compiling.wrapper = previous


class _Compiling:
    """Stands in for torch's own record of the active wrapper.

    torch keeps it in an attribute of its class. Setting that in each forward pass would drop the interpreter's cached
    lookups of the attributes of all wrappers.
    """

    wrapper: TorchDDP | None = None

    def __init__(self) -> None:
        self._torchs: Callable[[], Any] = TorchDDP._get_active_ddp_module

    def get(self) -> Any:
        """Return the wrapper whose forward pass is running: ours, or torch's own."""
        return self._torchs() if self.wrapper is None else self.wrapper


_compiling = _Compiling()
TorchDDP._get_active_ddp_module = staticmethod(_compiling.get)  # type: ignore[method-assign]


@cache
@never_compiled  # runs on the first call for each class, in the middle of what should become one graph
def _caller(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Return a function that calls a module of the class `kind`; None if it can be called directly."""
    if not getattr(kind.forward, "__module__", "").startswith("torch."):
        return None
    # torch.compile does not begin a graph in torch's own files, such as that of nn.Sequential, so it needs a function
    # elsewhere. Each class has its own function, because torch.compile stores the shapes of inputs by function name.
    code = _call_from_graph.__code__.replace(co_name=f"call_{kind.__name__}")
    return FunctionType(code, _call_from_graph.__globals__)


def _call_from_graph(module: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    return module(*inputs, **kwargs)


# -- the profiler ------------------------------------------------------------------------------------------------------


is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")
"""Returns whether a ``torch.profiler.profile`` or ``torch.autograd.profiler.profile`` block is open."""


@contextmanager
def before_profiling(call: Callable[[], None]) -> Iterator[None]:
    """In the block, call `call` whenever a torch profiler is about to start or warm up."""
    original: Any = profiler.profile._prepare_trace

    @functools.wraps(original)
    def prepare(self: Any) -> None:
        call()
        original(self)

    profiler.profile._prepare_trace = prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        profiler.profile._prepare_trace = original  # type: ignore[method-assign]


# -- the DataLoader ----------------------------------------------------------------------------------------------------

BatchIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
"""Base class of the iterators of a ``DataLoader``; its ``__next__`` waits for a batch."""


def parts_of(iterator: Any) -> tuple[Any, Any, int]:
    """Return the dataset, the sampler and the number of workers of an iterator of a ``DataLoader``."""
    return iterator._dataset, iterator._index_sampler, iterator._num_workers


def pipes_of(iterator: Any) -> tuple[Any, ...]:
    """Return the workers of an iterator and its connections to them; none of them refers to the dataset."""
    return iterator._workers, iterator._index_queues, iterator._worker_result_queue, iterator._workers_done_event


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Make ``get_worker_info()`` return None in the block, like in the main process."""
    worker: Any = torch.utils.data._utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
