"""Base class of all compressors: parameter names, error feedback, bytes on the wire, and a state to save.

Bytes are counted for one rank, assuming collectives that move as little data as possible, like ring algorithms; see
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

# No `from __future__ import annotations`: torch's DDP compares the annotations of `hook` with the classes themselves.

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket

from paceline.compression.pipeline import Gradients, Pipeline, Stages
from paceline.core.device_streams import keep
from paceline.core.torch_distributed import get_default_group, is_sharded
from paceline.core.unwrapping import plain_name, unwrap
from paceline.errors import CheckpointMismatch, UsageError


class Compressor(ABC):
    """A communication hook's state: ``model.register_comm_hook(state, compression.hook)``.

    Residuals are kept by parameter name, so they stay correct when buckets are rebuilt. Results are bit-identical on
    all ranks, because each rank computes them from the same bytes in rank order.

    Register the state with a Checkpointer as ``per_rank=True``, because each rank has its own residuals.

    Args:
        model: the wrapped model that will use this state in a communication hook. Gradients are averaged over the
            wrapper's process group, or over all ranks if the model is not wrapped.

    Raises:
        UsageError: if the model has tensor-parallel parameters.
    """

    collectives: ClassVar[int] = 1
    """Number of collectives that :meth:`reduce` launches."""
    bytes_on_wire: int
    """Bytes that this rank has sent, assuming collectives that move as little data as possible."""
    bytes_uncompressed: int
    """Bytes that all-reduces of the uncompressed gradients would have sent."""
    steps: int
    """Number of synchronized backward passes."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {plain_name(name): parameter for name, parameter in unwrap(model).named_parameters()}
        for name, parameter in self._parameters.items():
            if is_sharded(parameter):
                raise UsageError(
                    f"{type(self).__name__}: {name!r} is tensor-parallel, and tensor-parallel parameters cannot be "
                    "compressed; leave the compressor out, and wrap the model with reduce_dtype=torch.bfloat16 to send "
                    "half the bytes"
                )
        self.group = getattr(model, "process_group", None) or get_default_group()
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._residuals = Residuals()
        self._pipeline = Pipeline(self.collectives)
        self.bytes_on_wire = self.bytes_uncompressed = self.steps = 0

    @property
    def ratio(self) -> float:
        """Ratio of the bytes sent to the uncompressed bytes; 1.0 before the first step."""
        return self.bytes_on_wire / self.bytes_uncompressed if self.bytes_uncompressed else 1.0

    @abstractmethod
    def reduce(self, gradients: Gradients) -> Stages:
        """Average the bucket's gradients over the ranks, in stages that each yield the collective they launch.

        All stages run on one stream. The host must not read values, because it would have to wait for the device.
        """

    @torch.no_grad()
    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Take part in a bucket's reduction."""
        device = bucket.buffer().device
        future = self._pipeline.enter(bucket, device, self._stages(bucket))
        if bucket.is_last():
            self.steps += 1
        return future

    def _stages(self, bucket: Any) -> Stages:
        keep(bucket.buffer())  # a hook around this one may have allocated it on another stream
        gradients = Gradients.of(bucket, self._names)
        self.bytes_uncompressed += all_reduce_bytes(gradients.bytes_uncompressed, self.size)
        return (yield from self.reduce(gradients))

    # -- for the compressors ------------------------------------------------------------------------------------

    def _finish(self, gradients: Gradients, mean: Tensor) -> Tensor:
        """Write `mean` into the bucket, and keep what remains in ``gradients.flat`` for the next step.

        If the mean is not finite, every rank sees this and no optimizer steps. The residuals then stay unchanged,
        because a NaN would stay in them forever.
        """
        self._residuals.replace(gradients, torch.isfinite(mean.sum()))
        return gradients.write(mean)

    def _all_reduce(self, tensor: Tensor) -> Any:
        self.bytes_on_wire += all_reduce_bytes(tensor.numel() * tensor.element_size(), self.size)
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def _all_gather(self, message: Tensor) -> tuple[Any, Tensor]:
        """Launch the all-gather of the flat `message`; returns the work, and the (ranks, elements) tensor to fill."""
        gathered = message.new_empty(self.size, message.numel())
        self.bytes_on_wire += (self.size - 1) * message.numel() * message.element_size()
        # Since torch 2.13 the old name gives a deprecation warning.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return all_gather(gathered.view(-1), message, group=self.group, async_op=True), gathered

    # -- saved state --------------------------------------------------------------------------------------------

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to save, by role and parameter."""
        return {"residuals": self._residuals.by_name}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and counters, as plain values and tensors."""
        counters = {name: getattr(self, name) for name in ("steps", "bytes_on_wire", "bytes_uncompressed")}
        return {"kind": type(self).__name__, **counters, **{role: dict(state) for role, state in self._kept().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned on the same rank.

        Raises:
            CheckpointMismatch: if it belongs to another compressor or model.
        """
        if state.get("kind") != type(self).__name__:
            raise CheckpointMismatch(
                f"the saved state belongs to the compressor {state.get('kind')!r}, not to {type(self).__name__!r}; "
                "use the compressor that was saved"
            )
        # Everything is checked before anything is replaced, so that an error leaves this state intact.
        loaded: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        for role, target in self._kept().items():
            for name, tensor in state[role].items():
                self._expect(role, name, tensor)
            tensors = {name: tensor.to(self._parameters[name].device) for name, tensor in state[role].items()}
            # Cloned, because to() may return the caller's tensor, and residuals are updated in place.
            loaded.append((target, {name: tensor.clone() for name, tensor in tensors.items()}))
        for target, tensors in loaded:
            target.clear()
            target.update(tensors)
        self._residuals.forget_buckets()
        self.steps, self.bytes_on_wire = state["steps"], state["bytes_on_wire"]
        self.bytes_uncompressed = state["bytes_uncompressed"]

    def _expect(self, role: str, name: str, tensor: Tensor) -> None:
        wanted = self._shape(role, name)
        if wanted is None or tensor.shape != wanted:
            have = "no such parameter" if wanted is None else f"{tuple(wanted)}"
            raise CheckpointMismatch(
                f"the saved {role} of {name!r} have shape {tuple(tensor.shape)}, this model has {have}; load the state "
                "into the model and compressor that it was saved from"
            )

    def _shape(self, role: str, name: str) -> torch.Size | None:
        """Return the shape of the parameter's saved tensor with this role; None if it has none."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return None
        return torch.view_as_real(parameter).shape if parameter.is_complex() else parameter.shape


def hook(state: Compressor, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook for ``model.register_comm_hook(state, compression.hook)``; calls the compressor `state`."""
    return state(bucket)


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Return the bytes that each of `size` ranks sends for the sum of `nbytes`: a reduce-scatter and an all-gather."""
    return 2 * (size - 1) * nbytes // size


class Residuals:
    """Error feedback: the part of a rank's gradients that it has not sent yet and adds to the next gradients.

    Residuals are kept by parameter, so that they stay correct when buckets are rebuilt. See Seide et al., "1-bit
    stochastic gradient descent", Interspeech 2014, and Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019.
    """

    by_name: dict[str, Tensor]
    """Residual of each parameter: a view of its bucket's residuals, or a loaded one; see :meth:`forget_buckets`."""

    def __init__(self) -> None:
        self.by_name = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}
        """Residuals of each bucket, flat like its gradients; the keys are the names of its parameters."""

    def add_to(self, gradients: Gradients) -> None:
        """Add the residuals of a bucket to its gradients."""
        names = tuple(gradients.names)
        if names not in self._flat:
            self._gather(gradients)
        gradients.flat.add_(self._flat[names])

    def replace(self, gradients: Gradients, finite: Tensor) -> None:
        """Keep what remains in ``gradients.flat`` if `finite` is true; the host does not wait for its value."""
        flat = self._flat.get(tuple(gradients.names))
        if flat is not None:
            torch.where(finite, gradients.flat, flat, out=flat)

    def _gather(self, gradients: Gradients) -> None:
        """Collect the residuals for a new bucket in one tensor."""
        names = tuple(gradients.names)
        flat = torch.zeros_like(gradients.flat)
        for name, view in zip(names, gradients.views_of(flat), strict=True):
            if (previous := self.by_name.get(name)) is not None:
                view.copy_(previous)
                keep(previous)
            self.by_name[name] = view
        # Buckets that share a parameter with this one are gone: the wrapper has rebuilt its buckets.
        self._flat = {others: buffer for others, buffer in self._flat.items() if not set(others) & set(names)}
        self._flat[names] = flat

    def forget_buckets(self) -> None:
        """Use the residuals in :attr:`by_name` from now on, because they were changed from outside."""
        self._flat.clear()
