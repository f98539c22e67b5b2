"""The parameters of a wrapper's module: made equal at the start, and followed when the module changes.

A module may get a new head, an adapter, an unfrozen parameter, ``load_state_dict(assign=True)`` or ``model.to(dtype)``.
None of these calls the wrapper, so the wrapper inspects the module when a synchronized backward pass begins.

A rank that finds different parameters first runs one round of a backward pass's collectives with zeros, and reports the
change in its control block (:meth:`.Reducer.follow_module`). If all ranks report one, they compare names, shapes,
dtypes and the new values, and each rank rebuilds its buckets. A rank without a change takes part in this round with its
own backward pass. So a change on only some ranks raises an error on all of them, and no rank is left waiting.

Decision 0013 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.digests import tensor_digest
from paceline.core.torch_distributed import as_local, is_sharded, local_of, release
from paceline.core.torch_internals import current_task
from paceline.core.unwrapping import plain_name
from paceline.ddp.channel import Channel
from paceline.ddp.finisher import AllReduce, Finisher
from paceline.ddp.options import InitSync, check_averaged
from paceline.ddp.sparse import sparse_by_layer
from paceline.errors import ReplicaMismatch, UsageError

NamedTensors = Sequence[tuple[str, Tensor]]


def make_equal(channel: Channel, tensors: NamedTensors, init_sync: InitSync) -> None:
    """Compare the replicas' parameters and buffers, then broadcast rank 0's values, or verify that they are equal.

    Args:
        channel: connects all ranks; every rank calls this function.
        tensors: parameters and buffers by name.
        init_sync: ``True`` to broadcast, ``"verify"`` to compare, ``False`` for neither.
    """
    if init_sync is False:
        return
    # Compare first, because broadcasting tensors of different shapes would hang or mix them up.
    _compare(channel, [(name, _description(tensor)) for name, tensor in tensors])
    if init_sync == "verify":
        remedy = (
            "use the same seed or the same checkpoint on all ranks, or use init_sync=True to broadcast rank 0's values"
        )
        _compare(channel, [(name, _value(tensor)) for name, tensor in tensors], remedy)
    else:
        channel.broadcast([local_of(tensor.data) for _, tensor in tensors])


class _Value(str):
    """A digest; messages show it as `other values` instead of printing it."""


def _description(tensor: Tensor) -> str:
    return _describe_form(tensor) + ("" if tensor.requires_grad else ", no gradient")


def _describe_form(tensor: Tensor) -> str:
    """Return the properties of a parameter's memory that must be equal on all ranks."""
    # Strides matter too: a bucket holds each gradient in the memory layout of its parameter.
    strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    shard = f", with a shard of {tuple(local_of(tensor).shape)} here" if is_sharded(tensor) else ""
    return f"shape {tuple(tensor.shape)}{shard}, {tensor.dtype}{strides}"


def _value(tensor: Tensor) -> _Value:
    return _Value(tensor_digest(local_of(tensor.detach())).hex())


def _compare(
    channel: Channel, described: list[tuple[str, str]], remedy: str = "build the same model on every rank"
) -> None:
    descriptions = channel.all_gather_object(described)
    for rank, actual in enumerate(descriptions):
        if actual != descriptions[0]:
            raise ReplicaMismatch(_first_difference(descriptions[0], actual, rank, remedy))


def check_same_change(channel: Channel, named: NamedTensors, new: NamedTensors) -> None:
    """Compare the module's parameters after a change, and the values of the `new` ones; called by all ranks."""
    remedy = "make the same change on every rank, or wrap the module again"
    added = {id(parameter) for _, parameter in new}
    usual = [(name, f"{_describe_form(p)}, on {p.device.type}") for name, p in named if id(p) not in added]
    # New parameters come first, because the message names the first difference.
    described = [(name, f"{_describe_form(p)}, on {p.device.type}, new") for name, p in new] + usual
    try:
        _compare(channel, described, remedy)
        _compare(channel, [(name, _value(parameter)) for name, parameter in new], remedy)
    except ReplicaMismatch as error:
        raise ReplicaMismatch(f"the module's parameters were changed after it was wrapped: {error}") from None


def _first_difference(reference: list[tuple[str, str]], actual: list[tuple[str, str]], rank: int, remedy: str) -> str:
    """Describe in one sentence how rank `rank` differs from rank 0, followed by the `remedy`."""
    expected_forms, actual_forms = dict(reference), dict(actual)
    for name, form in reference:
        if name not in actual_forms:
            return f"{name!r} is in the model of rank 0 but not on rank {rank}; {remedy}"
        if actual_forms[name] != form:
            if isinstance(form, _Value):
                return f"{name!r} has different values on rank {rank} than on rank 0; {remedy}"
            return f"{name!r} has {actual_forms[name]} on rank {rank} but {form} on rank 0; {remedy}"
    for name in actual_forms:
        if name not in expected_forms:
            return f"{name!r} is in the model of rank {rank} but not on rank 0; {remedy}"
    # The names and shapes are the same, so only the order differs; buckets are assigned in this order.
    place = next(place for place, (a, b) in enumerate(zip(reference, actual, strict=True)) if a != b)
    return (
        f"parameter {place} is {actual[place][0]!r} on rank {rank} but {reference[place][0]!r} on rank 0, so the order "
        f"differs; {remedy}"
    )


Named = list[tuple[str, nn.Parameter]]
OnChange = Callable[[Named, bool], None]
"""Function called with all parameters to average, and with whether they are already being averaged."""
Form = tuple[torch.Size, torch.dtype, torch.device]
_requires_grad, _shape, _dtype = map(attrgetter, ("requires_grad", "shape", "dtype"))
_address = Tensor.data_ptr


@dataclass(frozen=True)
class Change:
    """The difference between the module's parameters and the averaged parameters."""

    named: Named
    """All parameters to average from now on, in the module's order."""
    new: Named
    """Parameters that are not averaged yet, or whose shape, dtype or device has changed."""


class ModuleWatch:
    """Detects when the parameters of a wrapper's module differ from the averaged parameters.

    Args:
        modules: the wrapper's ``_modules``, so that assigning a new ``model.module`` is detected too.
        ignored: names of parameters that are not averaged; extended with names that the module lists later.
        trained: the parameters that are averaged.
    """

    def __init__(self, modules: dict[str, Any], ignored: set[str], trained: Named) -> None:
        self._modules, self._ignored = modules, ignored
        self.change: Change | None = None
        """The difference found at the last inspection of the module; None if there was none."""
        self.changes = 0
        """Number of times that the module was found to have changed."""
        self._looked_in = -1  # the graph task of the last inspection
        self.follow(trained)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._modules["module"]
        return module

    def named_parameters(self) -> Named:
        """Return the current parameters, without the ignored ones."""
        named = self.module.named_parameters()
        return [(plain_name(name), parameter) for name, parameter in named if name not in self._ignored]

    def untrained(self) -> str | None:
        """Return the name of a parameter that requires a gradient but is ignored by name, or None."""
        named = self.module.named_parameters()
        return next((name for name, parameter in named if parameter.requires_grad and name in self._ignored), None)

    def follow(self, trained: Named) -> None:
        """From now on, expect the module to have the parameters `trained`, which are being averaged."""
        self._trained = [parameter for _, parameter in trained]  # kept alive so that their ids are not reused
        self._forms = {id(parameter): _form(parameter) for parameter in self._trained}
        self.change = None
        self._remember()

    def detect(self) -> Change | None:
        """Return the module's change, or None if it has no new parameters to average."""
        task = current_task()
        # Inspect only once per graph task: the module does not change during it, and the hook of every output calls
        # this.
        if task == self._looked_in != -1:
            return self.change
        self._looked_in = task
        # Look again if a change is pending: it may have been undone, for example by freezing, which differs() does not
        # see.
        if self.change is not None or self.differs():
            self.change = self._find()
            self._remember()
        return self.change

    def unchanged(self) -> Change:
        """Return a change without new parameters, to compare with ranks whose module has changed."""
        return Change([pair for pair in self.named_parameters() if id(pair[1]) in self._forms], [])

    def sparse(self, parameters: Sequence[nn.Parameter]) -> frozenset[int]:
        """Return the indices of the `parameters` whose layer produces sparse gradients."""
        ids = sparse_by_layer(self.module)
        return frozenset(index for index, parameter in enumerate(parameters) if id(parameter) in ids)

    def _find(self) -> Change | None:
        self._ignored |= set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))
        # Skip tensors that functional_call puts in a parameter's place: they are not leaves, or are only temporary.
        named = [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if not is_lazy(parameter)
            and parameter.is_leaf
            and (parameter.requires_grad or id(parameter) in self._forms)
        ]
        new = [(name, parameter) for name, parameter in named if self._forms.get(id(parameter)) != _form(parameter)]
        return Change(named, new) if new else None

    # -- a comparison that costs next to nothing -----------------------------------------------------------------

    def _remember(self) -> None:
        self.changes += 1
        parts = list(self.module.modules())
        self._dicts: list[dict[str, Any]] = [self._modules, *(part._modules for part in parts)]
        self._dicts += [part._parameters for part in parts]
        self._copies = [dict(children) for children in self._dicts]
        # Dicts compare values by identity first, then with ==, which returns a tensor for two tensors. Its truth value
        # raises an error unless it has exactly one element, so one-element parameters are compared separately, by
        # identity.
        self._single = [
            (part._parameters, key, value)
            for part in parts
            for key, value in part._parameters.items()
            if value is not None and not is_lazy(value) and value.numel() == 1
        ]
        named = self.named_parameters()
        self._others = [
            parameter for _, parameter in named if id(parameter) not in self._forms and not parameter.requires_grad
        ]
        self._shapes, self._dtypes = list(map(_shape, self._trained)), list(map(_dtype, self._trained))
        self._device = self._trained[0].device
        # None with a DTensor, whose address does not tell where its shard is.
        is_plain = all(type(parameter) in (nn.Parameter, Tensor) for parameter in self._trained)
        self._addresses = list(map(_address, self._trained)) if is_plain else None

    def differs(self) -> bool:
        """Return whether the module may have changed since it was last inspected; costs next to nothing."""
        try:
            if self._dicts != self._copies:
                return True
        except Exception:  # == of two different tensors has no truth value
            return True
        for held, key, value in self._single:
            if held[key] is not value:
                return True
        if self._others and any(map(_requires_grad, self._others)):
            return True
        if list(map(_shape, self._trained)) != self._shapes:
            return True
        # Cheaper than reading dtypes, and memory of another dtype has another address.
        if self._addresses is not None and list(map(_address, self._trained)) == self._addresses:
            return False
        # One device is enough, because modules are moved as a whole.
        if list(map(_dtype, self._trained)) != self._dtypes or self._trained[0].device != self._device:
            return True
        if self._addresses is not None:
            self._addresses = list(map(_address, self._trained))
        return False


def _form(parameter: Tensor) -> Form:
    return parameter.shape, parameter.dtype, parameter.device


def find_refusal(change: Change, channel: Channel, finisher: Finisher, device: torch.device) -> UsageError | None:
    """Return the error for a `change` that differs between ranks or is not supported; called by all ranks."""
    try:
        check_same_change(channel, change.named, change.new)
        check_averaged(change.named)
    except UsageError as error:
        return error
    if not isinstance(finisher, AllReduce):
        return UsageError(
            f"parameters such as {change.new[0][0]!r} were added to the module after a communication hook was "
            "registered, and the hook's state may not fit them; wrap the module again and register the hook again"
        )
    devices = sorted({str(parameter.device) for _, parameter in change.named} | {str(device)})
    if len(devices) > 1:
        return UsageError(
            f"parameters of the module were moved to another device or added there after it was wrapped "
            f"({', '.join(devices)}); move the whole module to one device and wrap it again"
        )
    return None


class Trained:
    """The averaged parameters, indexed in the module's order.

    The object lives as long as the wrapper. When the module's parameters change, its lists are replaced between two
    backward passes.
    """

    names: list[str]
    """Names of the parameters."""
    originals: list[nn.Parameter]
    """Parameters as stored in the module."""
    parameters: list[nn.Parameter]
    """Parameters whose ``grad`` is averaged; for a DTensor, a parameter that wraps this rank's shard."""

    def __init__(self, named: Named) -> None:
        self.use(named)

    def use(self, named: Named) -> None:
        self.names, self.originals = [name for name, _ in named], [parameter for _, parameter in named]
        self.parameters = [as_local(parameter) for parameter in self.originals]

    def release(self) -> None:
        """Remove the hooks that convert the gradients of DTensors to the layout the reducer needs."""
        for parameter in self.parameters:
            release(parameter)
