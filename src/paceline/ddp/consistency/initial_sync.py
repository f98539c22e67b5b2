"""Initial synchronization: compares parameters by name, shape and dtype, then makes their values equal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.core.state.digests import tensor_digest
from paceline.core.torch_internals.distributed.dtensor import is_sharded, local_of
from paceline.ddp.options.config import InitSync
from paceline.ddp.transport.channel import Channel
from paceline.errors import ReplicaMismatch

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
