"""The guard: counts optimizer steps for the control block, and refuses steps with gradients that were not averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from operator import itemgetter
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.core.spans import OPTIMIZER, recorder
from paceline.core.torch_internals import current_task, is_profiling, never_compiled
from paceline.ddp.ledger import Ledger
from paceline.ddp.weights import WEIGHTED
from paceline.errors import UsageError

_BY_HAND = (
    "; if they are already the same on every rank, call model.gradients_are_averaged() on all of them first, or name "
    "parameters whose gradients the module averages itself in module._ddp_params_and_buffers_to_ignore"
)
_params = itemgetter("params")


class StepGuard:
    """Watches every optimizer that trains any of `parameters`.

    ``local_gradient()`` returns the name of a parameter whose gradient the wrapper has not averaged, or None. Such a
    gradient may differ between ranks, or the training loop may have made it equal. The guard cannot compare ranks on
    its own, because that takes a collective; the script must call ``model.gradients_are_averaged()`` on every rank.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ledger: Ledger,
        local_gradient: Callable[[], str | None],
        read_late: Callable[[], None] = lambda: None,
        all_parameters: Callable[[], Sequence[nn.Parameter]] = lambda: (),
    ) -> None:
        self._ledger, self._local_gradient = ledger, local_gradient
        self._all_parameters = all_parameters
        self._read_late = read_late
        self._stepped: Callable[[], object] | None = None  # ends the span of the current step
        self._number = next(_numbers)
        # The id of the optimizer that is stepping, and the number of synchronizations when its step began.
        self._outermost: tuple[int, int] | None = None
        _guards().add(self)
        self.guard(parameters)

    def guard(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on, guard optimizer steps over `parameters`, which are averaged."""
        self._ours = self._ledger.settings.averaged = {
            id(parameter): index for index, parameter in enumerate(parameters)
        }
        Watched.version += 1  # an optimizer may train parameters of other wrappers now

    def before(self, optimizer: Watched, identity: int, *, has_closure: bool) -> None:
        """Check gradients before the optimizer steps; raises the errors of :meth:`check_whole` and ``read_late()``.

        With a closure, gradients are checked after each call of the closure instead, because the synchronized backward
        pass may run inside it.

        Args:
            optimizer: the optimizer, which trains parameters of the wrapper.
            identity: its ``id``.
            has_closure: whether it was given a closure.
        """
        self._read_late()  # first, because this may complete averages that the step uses
        ledger = self._ledger
        if not has_closure:
            seen, number = optimizer.seen, self._number
            if (
                ledger.local_tasks
                or ledger.status.weighting & WEIGHTED
                or ledger.synchronizations == seen.get(number, 0)
            ):
                self.check_whole("optimizer.step()", seen.get(number, 0))
            seen[number] = ledger.synchronizations
        # One optimizer may step inside another, and only on some ranks (ZeroRedundancyOptimizer). If an outer step
        # raised and never reached its end, it counts as over once new gradients exist.
        if self._outermost is None or self._outermost[1] != ledger.synchronizations:
            self._outermost = identity, ledger.synchronizations
            is_recorded = recorder.on or recorder.box is not None or is_profiling()
            self._stepped = recorder.open(OPTIMIZER, id(self)) if is_recorded else None

    def closure_ran(self, optimizer: Watched) -> None:
        """Check gradients after the closure of an optimizer, which trains parameters of the wrapper."""
        self._read_late()
        self.check_whole("optimizer.step(closure)", optimizer.seen.get(self._number, 0))
        optimizer.seen[self._number] = self._ledger.synchronizations

    def check_whole(self, caller: str, synchronizations_before: int | None = None) -> None:
        """Refuse gradients that are not fully averaged over the ranks or not divided by their weight.

        A backward pass may have stayed local under ``no_sync``, or it may have bypassed the wrapper. The second case is
        checked only if nothing was synchronized after `synchronizations_before`, because a program may replace the
        averages. Inside ``local_steps``, the gradients are meant to be local.
        """
        if self._ledger.in_local_steps:
            if self._ledger.is_weight_pending:
                raise self._refusal(
                    f"{caller} found gradients that were not divided by the weights passed to model.weight(), because "
                    "that happens when they are averaged over the ranks, and model.local_steps() keeps them local",
                    "leave model.weight() out, and compute a mean loss in each local step",
                )
            self._ledger.stepped_locally()
            return
        if self._ledger.local_tasks:
            raise self._refusal(
                f"{caller} found gradients that the wrapper has not averaged over the ranks, because the last backward "
                "ran under no_sync(), in local_steps() or in the middle of accumulate()",
                "step only when model.do_sync is true, call model.sync_gradients() first, or run the step inside "
                f"model.local_steps() too if replicas may differ for a while (local SGD){_BY_HAND}",
            )
        if self._ledger.is_weight_pending:
            raise self._refusal(
                f"{caller} found gradients that were not divided by the weights passed to model.weight(), because no "
                "backward pass through the wrapper's own output followed",
                "call the wrapper and not model.module, or call model.sync_gradients() first",
            )
        if self._ledger.synchronizations == synchronizations_before and (name := self._local_gradient()) is not None:
            raise self._refusal(
                f"{caller} found a gradient of {name!r} that the wrapper has not averaged over the ranks, because "
                "no backward pass has been synchronized since the last step",
                f"call the wrapper and not model.module, or call model.sync_gradients() first{_BY_HAND}",
            )

    def _refusal(self, problem: str, remedy: str) -> UsageError:
        if current_task() >= 0:
            remedy = "the call runs in a hook, before this backward has averaged its gradients: step after it returns"
        return UsageError(f"{problem}; {remedy}")

    def after(self, optimizer: Watched, number: int) -> None:
        """Count the optimizer's step, unless it ran inside another optimizer's step; `number` is its ``id``."""
        if self._outermost is not None and self._outermost[0] == number:
            self._outermost = None
            if self._stepped is not None:
                self._stepped()
            self._ledger.status.optimizer_steps += 1
            stepped = self._ledger.settings.stepped
            if stepped != [optimizer.reference]:
                if optimizer.reference in stepped:
                    stepped.clear()
                stepped.append(optimizer.reference)
            if self._ledger.local_tasks:  # the step did not call its closure
                self.check_whole("optimizer.step(closure)")

    def known(self) -> set[int]:
        """Return the ids of the parameters that the wrapper averages, and of the ignored ones."""
        return self._ours.keys() | {id(parameter) for parameter in self._all_parameters()}

    @property
    def has_peers(self) -> bool:
        return self._ledger.has_peers

    def refuse(self, unknown: UnknownParameter, optimizer: Optimizer) -> None:
        """Refuse a step of `optimizer` if `unknown` got a gradient in this wrapper's latest backward pass."""
        if not (self.has_peers and unknown.task == self._ledger.task != -1):
            return
        parameter: Tensor = optimizer.param_groups[unknown.group]["params"][unknown.place]
        if parameter.grad is not None and id(parameter) not in _known():
            raise UsageError(
                f"optimizer.step() found a gradient of parameter {unknown.place} of group {unknown.group} of "
                f"{type(optimizer).__name__}, of shape {tuple(parameter.shape)}, which is not averaged by any "
                "DistributedDataParallel, although it comes from a backward through the model; register the parameter "
                "in the wrapped module (and name it in module._ddp_params_and_buffers_to_ignore if ranks should keep "
                "their own), or call model.gradients_are_averaged() before each step if its gradient is already the "
                "same on every rank"
            )

    def has_state(self) -> bool:
        """Return whether any optimizer that has stepped keeps state, such as momentum."""
        optimizers = [watched.reference() for watched in list(_watched.values()) if self._number in watched.seen]
        return any(optimizer.state for optimizer in optimizers if optimizer is not None)

    def trains(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` trains a parameter of the wrapper."""
        return any(id(parameter) in self._ours for group in optimizer.param_groups for parameter in group["params"])


class UnknownParameter:
    """An optimizer's parameter that no wrapper knew at the optimizer's first step; see :meth:`StepGuard.refuse`.

    Its gradient may come from a backward pass that does not involve any wrapper; the id of the graph task tells.
    """

    # Stored by position, because torch.utils.swap_tensors refuses tensors with weak references.
    def __init__(self, group: int, place: int, parameter: nn.Parameter) -> None:
        self.group, self.place = group, place
        self.task = -1  # the graph task of its latest gradient
        parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _parameter: Tensor) -> None:
        self.task = current_task()


def _known() -> set[int]:
    return set().union(*(guard.known() for guard in list(_guards())))


def _find_unknown(optimizer: Optimizer) -> list[UnknownParameter]:
    known_ids = _known()
    return [
        UnknownParameter(number, place, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in known_ids
    ]


class Watched:
    """An optimizer that has stepped, and the guards of the wrappers whose parameters it trains."""

    version = 0
    """Number of changes to the parameters of all wrappers."""

    def __init__(self, optimizer: Optimizer) -> None:
        number = id(optimizer)
        self.reference = ref(optimizer, lambda _: _watched.pop(number, None))
        self.seen: dict[int, int] = {}
        """For each guard, by number, the number of synchronizations at the optimizer's last step."""
        self.guards: list[ref[StepGuard]] = []
        self.state: Any = None
        """The version, and the id and length of each group's list, when the guards were looked up."""
        self._groups: list[list[nn.Parameter]] = []  # kept alive so that their ids are not reused
        self._size = -1
        self.unknown: list[UnknownParameter] = []
        """The parameters that no wrapper knew when their number was last found to have changed."""

    def look_up(self, optimizer: Optimizer) -> None:
        """Find the guards, because a wrapper or the optimizer's groups have changed."""
        self._groups, guards = list(map(_params, optimizer.param_groups)), list(_guards())
        self.state = Watched.version, list(map(id, self._groups)), list(map(len, self._groups))
        self.guards = [ref(guard) for guard in guards if guard.trains(optimizer)]
        size = sum(map(len, self._groups))
        if size != self._size and any(guard.has_peers for guard in guards):
            self._size, self.unknown = size, _find_unknown(optimizer)


_watched: dict[int, Watched] = {}
"""The living optimizers that have stepped, by id."""
_numbers = count()


@cache
def _guards() -> WeakSet[StepGuard]:
    """Return the guards of this process; each lives as long as its wrapper.

    torch's global optimizer hooks are registered once and never removed: a wrapper may be garbage-collected in the
    middle of a step, while torch iterates over the hooks.
    """
    guards: WeakSet[StepGuard] = WeakSet()

    @never_compiled
    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
        has_closure, number = callable(closure), id(optimizer)
        if (watched := _watched.get(number)) is None:
            watched = _watched[number] = Watched(optimizer)
        groups = list(map(_params, optimizer.param_groups))
        if not watched.guards or watched.state != (Watched.version, list(map(id, groups)), list(map(len, groups))):
            watched.look_up(optimizer)
        for reference in watched.guards:
            if (guard := reference()) is not None:
                guard.before(watched, number, has_closure=has_closure)
        for parameter in watched.unknown:
            for guard in list(guards):
                guard.refuse(parameter, optimizer)
        return _with_check(watched, closure, args, kwargs) if has_closure else None

    @never_compiled
    def after(optimizer: Optimizer, *_: Any) -> None:
        number = id(optimizer)
        if (watched := _watched.get(number)) is not None:  # None if the first wrapper was made during the step
            for reference in watched.guards:
                if (guard := reference()) is not None:
                    guard.after(watched, number)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    return guards


def _with_check(
    watched: Watched, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``optimizer.step()``, with the closure replaced by one that also checks gradients."""

    @never_compiled
    def checked() -> Any:
        loss = closure()
        for reference in watched.guards:
            if (guard := reference()) is not None:
                guard.closure_ran(watched)
        return loss

    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, kwargs | {"closure": checked}
