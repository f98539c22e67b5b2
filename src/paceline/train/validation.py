"""Checks the arguments of the Trainer, evaluate() and predict() before any work starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpointer
from paceline.core import consensus
from paceline.core.digests import quick_digest
from paceline.core.messages import with_article
from paceline.core.stacks import warn
from paceline.core.unwrapping import unwrap
from paceline.data import DataLoader, GlobalBatchStream
from paceline.data.dataset_digest import columns, element_bytes
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointMismatch, CheckpointWarning, UsageError
from paceline.train.config import TrainConfig

# The settings that determine a run's results, which are compared when the run is resumed.


_DECISIVE = ("accumulate", "clip_norm", "precision")
"""The length is not included, because a run may be made longer, unless its schedule depends on the length."""
_FIXED = ("batch_size", "scheduler", "virtual_ranks")
"""Settings that must stay the same: the data position or sums of losses depend on them, or schedulers restore them."""


class Settings:
    """Raises an error if a checkpoint was written with different settings, unless the config allows changes."""

    state_is_constant = True

    def __init__(self, config: TrainConfig, **more: Any) -> None:
        self._allow_changed = config.allow_changed_settings
        self._values: dict[str, Any] = {name: getattr(config, name) for name in _DECISIVE} | more

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        for name, saved_value, value in self._changed(saved):
            if self._allow_changed and name not in _FIXED:
                continue
            allow = "accept the change with allow_changed_settings=True (--allow-changed-settings), "
            raise CheckpointMismatch(
                f"the checkpoint was written with {name}={saved_value!r}, but this run has {name}={value!r}; "
                f"resume with the same settings, {'' if name in _FIXED else allow}or start again in another folder"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        changed = [f"{name}={value!r} instead of {saved_value!r}" for name, saved_value, value in self._changed(saved)]
        if changed and consensus.here().rank == 0:
            warn(f"the run continues with changed settings: {', '.join(changed)}", CheckpointWarning)

    def _changed(self, saved: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the name, the saved value and this run's value of each setting that differs."""
        rows = [(name, saved.get(name), self._values.get(name)) for name in sorted(saved.keys() | self._values.keys())]
        return [(name, saved_value, value) for name, saved_value, value in rows if saved_value != value]


# Fingerprints of training data, which detect changes when a run is resumed, without loading a sample.
#
# A fingerprint contains a digest of every column from :func:`paceline.data.dataset_digest.columns`. The digest covers
# the
# whole column if it is a tensor of up to ``WHOLE_BYTES``. Otherwise it covers ``MOST_ROWS`` evenly spaced rows, and
# changes to other rows are not detected. Files are compared only by name.


MOST_ROWS = 2**16
WHOLE_BYTES = 2**28


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return the class and the number of samples of `dataset`, and the digest of each column, as plain values."""
    size = len(dataset) if hasattr(dataset, "__len__") else -1
    digests = {name: values if isinstance(values, str) else _column_digest(values) for name, values in columns(dataset)}
    return {"class": type(dataset).__qualname__, "number of samples": size, **digests}


def _column_digest(values: Any) -> str:
    is_dense = isinstance(values, Tensor) and values.layout is torch.strided
    if is_dense and values.numel() * values.element_size() <= WHOLE_BYTES:
        return f"{tuple(values.shape[1:])} {values.dtype} {int(quick_digest(values)):x}"
    count = len(values)
    rows: Sequence[int] = range(count)
    if count > MOST_ROWS:  # evenly spaced, including the first and the last
        rows = [number * (count - 1) // (MOST_ROWS - 1) for number in range(MOST_ROWS)]
    total = hashlib.sha256(f"{type(values).__name__} {count}".encode())
    for row in rows:
        total.update(hashlib.sha256(element_bytes(values[row])).digest())
    return total.hexdigest()


class DataIdentity:
    """Raises an error at a resume if the data have changed since the checkpoint was written."""

    state_is_constant = True

    def __init__(self, dataset: Any) -> None:
        self._fingerprint = fingerprint(dataset)

    def state_dict(self) -> dict[str, Any]:
        return self._fingerprint

    def check_state_dict(self, saved: dict[str, Any]) -> None:
        current = self._fingerprint
        if changed := [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]:
            raise CheckpointMismatch(
                f"the training data differ from the checkpoint's in {', '.join(changed)}; resume on the same data, or "
                "start a new run in another folder with the weights that paceline.load_weights() reads"
            )

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keep the data; :meth:`check_state_dict` has compared them."""


def validate_config(config: Any, loss: Any) -> None:
    """Check that `config` is a TrainConfig and `loss` is callable."""
    if not isinstance(config, TrainConfig):
        raise UsageError(f"config must be a TrainConfig, not {described(config)}: TrainConfig(epochs=3)")
    if not callable(loss):
        raise UsageError(f"loss must be a function loss(model, batch), not {described(loss)}")


def validate_wrapper(model: Any, caller: str) -> None:
    """Check that `model` is in Paceline's wrapper; it may be compiled with ``torch.compile``."""
    inner = getattr(model, "_orig_mod", model)  # the module inside torch.compile's
    if isinstance(inner, DistributedDataParallel):  # first, because it is a subclass of torch's
        return
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        remedy = "import DistributedDataParallel from paceline instead of from torch"
    elif isinstance(inner, nn.Module):
        remedy = "wrap it first: paceline.DistributedDataParallel(model)"
    else:
        remedy = "give paceline.DistributedDataParallel(model)"
    raise UsageError(f"{caller} needs a model in Paceline's wrapper, not {described(inner)}; {remedy}")


def validate_loader(loader: Any, owner: str) -> None:
    """Check that `loader` is a Paceline DataLoader."""
    if not isinstance(loader, DataLoader):
        remedy = "give paceline.data.DataLoader(dataset, batch_size=…), with the batch size of all ranks together"
        if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size:
            remedy += f" (this one has {loader.batch_size} on each rank)"
        raise UsageError(f"{owner} needs Paceline's DataLoader, not {described(loader)}; {remedy}")


def validate_training_loader(loader: Any, config: TrainConfig) -> None:
    """Check that the Trainer can train on `loader`."""
    validate_loader(loader, "the Trainer")
    if isinstance(loader.progress, GlobalBatchStream) and config.max_steps is None:
        raise UsageError("the length of a stream is unknown; give TrainConfig(max_steps=…) instead of epochs")


def validate_virtual_ranks(model: DistributedDataParallel, config: TrainConfig, loaders: Iterable[DataLoader]) -> None:
    """Check that the batches of all `loaders` can be cut into slices for the model's virtual ranks, if it has any."""
    if (count := model.virtual_ranks) is None:
        return
    if config.accumulate > 1:
        raise UsageError(
            f"virtual_ranks={count} already cuts a step into micro-batches; leave out accumulate={config.accumulate} "
            "(--micro-batches), or use more virtual ranks"
        )
    for loader in loaders:
        loader.progress.slicing.shares(count)  # refuses a number that does not fit


def validate_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that the Trainer can step `optimizer`, and that it has parameters of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the Trainer needs a torch.optim.Optimizer, not {described(optimizer)}")
    has_views = all(callable(getattr(optimizer, view, None)) for view in ("train", "eval"))
    if has_views or isinstance(optimizer, torch.optim.LBFGS):
        needed = "train() and eval()" if has_views else "step(closure)"
        raise UsageError(
            f"{type(optimizer).__name__} needs {needed}, which the Trainer does not call; use another optimizer, or "
            "write a training loop"
        )
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise UsageError(
            "the optimizer has none of the model's parameters; create it from this model: "
            "torch.optim.SGD(model.parameters(), …)"
        )


def validate_same_world(model: DistributedDataParallel) -> None:
    """Check that the model averages over all ranks, because data and checkpoints are split over all ranks."""
    size = torch.distributed.get_world_size(model.process_group)
    if size != (world_size := torch.distributed.get_world_size()):
        raise UsageError(
            f"the model averages over {size} ranks, but the Trainer splits data and checkpoints over all {world_size}; "
            "wrap the model without process_group, or write a plain loop"
        )


def validate_checkpointer(checkpointer: Any, config: TrainConfig, model: DistributedDataParallel) -> None:
    """Check that there is a Checkpointer if the config needs one, and that it can save the model's buffers."""
    if checkpointer is None:
        for name in ("resume", "load_best_at_end"):
            if getattr(config, name):
                raise UsageError(f"{name} needs checkpoints; give Trainer(…, checkpointer=Checkpointer(folder))")
        return
    if not isinstance(checkpointer, Checkpointer):
        raise UsageError(f"checkpointer must be a paceline.Checkpointer, not {described(checkpointer)}")
    if config.load_best_at_end and checkpointer.keep_best is None:
        raise UsageError("load_best_at_end needs a metric; give Checkpointer(…, keep_best=…)")
    size = torch.distributed.get_world_size(model.process_group)
    buffers = unwrap(model).state_dict().keys() & dict(unwrap(model).named_buffers()).keys()
    if size > 1 and buffers and not model.forward_sync_buffers:
        raise UsageError(
            f"with broadcast_buffers=False ranks have different buffers (such as {min(buffers)!r}), but a checkpoint "
            "holds rank 0's; leave out broadcast_buffers or the checkpointer"
        )


def summed_loss(returned: Any) -> tuple[Tensor, float]:
    """Check and return the loss and the weight that a loss function `returned`."""
    remedy = "return the loss summed over the micro-batch, and the number of samples or tokens it sums over"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UsageError(
            f"the loss function returned {described(returned)} instead of two values; {remedy}: "
            'F.cross_entropy(model(x), y, reduction="sum"), len(y)'
        )
    loss, weight = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"the loss function returned {described(loss)} as the loss; {remedy}")
    if not loss.requires_grad:
        raise UsageError(
            "the loss function returned a loss without a gradient; compute it from model(x), without torch.no_grad(), "
            ".item() or .detach()"
        )
    if isinstance(weight, bool) or (isinstance(weight, Tensor) and weight.numel() != 1) or not is_number(weight):
        raise UsageError(f"the loss function returned {described(weight)} as the weight; {remedy}")
    return loss, weight


def is_number(value: Any) -> bool:
    """Return whether `value` can be a float."""
    return isinstance(value, Tensor) or hasattr(value, "__float__")


def described(value: Any) -> str:
    """Return the type of `value`, or the shape of a tensor, with an article."""
    value_type = type(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = (
        value_type.__qualname__
        if value_type.__module__ == "builtins"
        else f"{value_type.__module__}.{value_type.__qualname__}"
    )
    return with_article(name)
