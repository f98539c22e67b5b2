"""The batch whose forward and backward are run without memory."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.tools.memory_estimate.built_model import BuiltModel, described
from paceline.tools.memory_estimate.dry_run import DryRun, Inputs, run_dry
from paceline.tools.memory_estimate.kernels import Device

OPTIONS = "--batch-size, --sequence-length and --input-shape"


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch: tokens of a sequence length, or floating-point tensors of a shape."""

    size: int
    sequence_length: int | None = None
    shape: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        """Description of the batch for people."""
        if self.sequence_length is not None:
            return f"{self.size} × {self.sequence_length:,} tokens"
        return f"a batch of shape {(self.size, *(self.shape or ()))}"


def batch_of(size: int | None, sequence_length: int | None, shape: str | None) -> Batch | None:
    """Return the batch that the options describe; None without any.

    Raises:
        UsageError: if they are wrong, or do not go together.
    """
    for name, number in (("batch-size", size), ("sequence-length", sequence_length)):
        if number is not None and number < 1:
            raise UsageError(f"--{name}={number} is less than 1; give 1 or more")
    if sequence_length is not None and shape is not None:
        raise UsageError("--sequence-length is for tokens and --input-shape for other inputs; give one of them")
    extents = None if shape is None else _extents(shape)
    if size is None and (sequence_length, shape) == (None, None):
        return None
    if sequence_length is None and extents is None:
        raise UsageError("--batch-size needs --sequence-length, for tokens, or --input-shape; give one of them")
    return Batch(1 if size is None else size, sequence_length, extents)


def _extents(text: str) -> tuple[int, ...]:
    try:
        extents = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        extents = ()
    if not extents or min(extents) < 1:
        raise UsageError(f"--input-shape {text}: give the shape of one sample, such as 3,224,224")
    return extents


def run_of(
    name: str,
    model: BuiltModel,
    batch: Batch,
    *,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    device: Device,
) -> DryRun:
    """Return the bytes of a forward and backward of the model `name`; do not use the model afterwards.

    Raises:
        UsageError: if they fail.
    """
    if model.is_of_transformers:
        _check_fitting(name, model, batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about tensors without values, not about the user's model
            return run_dry(
                model.module,
                lambda: _inputs(model, batch),
                dtype=dtype,
                autocast=autocast,
                # With real values, transformers leaves out a mask that hides nothing; here it cannot look, and makes
                # one.
                is_maskless=model.is_of_transformers,
                device=device,
            )
    except UsageError as error:
        raise UsageError(f"{name} cannot be estimated with {batch.title}: {error}") from error
    except (Exception, SystemExit) as error:  # the model's, of any class
        raise UsageError(_why_failed(name, batch, error)) from error


def _why_failed(name: str, batch: Batch, error: BaseException) -> str:
    text = described(error)
    # By their names, because torch has the classes in a private module.
    if type(error).__name__ == "DataDependentOutputException" or ".numpy() is not supported" in text:
        fault = "reads the values of a tensor, as .item(), .numpy() and an if do, and here tensors have none"
    elif type(error).__name__ == "DynamicOutputShapeException":
        fault = "makes a tensor whose shape depends on values, as nonzero() and a mask do, and here tensors have none"
    else:
        tensor = "a floating-point tensor" if batch.sequence_length is None else "an int64 tensor"
        return (
            f"a forward and backward of {name} failed with {batch.title}, {tensor}: {text}; give a batch that it "
            "takes, or none; for other inputs, name a module whose forward makes them of such a tensor"
        )
    place = text[text.rindex(" (") :] if text.endswith(")") else ""
    return f"{name} {fault}{place}; change that, or leave {OPTIONS} out for an estimate without activations"


def _check_fitting(name: str, model: BuiltModel, batch: Batch) -> None:
    takes_tokens = model.input_name == "input_ids"
    if takes_tokens and batch.sequence_length is None:
        raise UsageError(f"{name} takes tokens; give --sequence-length in place of --input-shape")
    if not takes_tokens and batch.shape is None:
        raise UsageError(f"{name} does not take tokens; give --input-shape in place of --sequence-length")
    if model.positions is not None and (batch.sequence_length or 0) > model.positions:
        raise UsageError(
            f"--sequence-length={batch.sequence_length} is more than the {model.positions:,} positions of {name}"
        )


def _inputs(model: BuiltModel, batch: Batch) -> Inputs:
    """Return the arguments of a forward."""
    if batch.sequence_length is None:
        floating = (parameter.dtype for parameter in model.module.parameters() if parameter.is_floating_point())
        tensor = torch.ones(batch.size, *(batch.shape or ()), dtype=next(floating, torch.float32))
    else:
        tensor = torch.zeros(batch.size, batch.sequence_length, dtype=torch.int64)
    if model.input_name is None:
        return (tensor,), {}
    options: dict[str, Any] = {"labels": tensor} if model.has_labels else {}
    # As the recipes train: a cache of keys and values is for generation.
    if "use_cache" in inspect.signature(model.module.forward).parameters:
        options["use_cache"] = False
    return (), {model.input_name: tensor, **options}
