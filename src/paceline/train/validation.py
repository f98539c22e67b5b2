"""Checks the arguments of the Trainer, evaluate() and predict() before any work starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import Checkpointer
from paceline.core.messages import with_article
from paceline.core.unwrapping import unwrap
from paceline.data import DataLoader, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.optim.local_sgd import IslandOptimizer
from paceline.train.config import TrainConfig


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


def validate_same_world(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Check that the model averages over all ranks, or over an island of the optimizer.

    Data and checkpoints are split over all ranks.
    """
    if isinstance(optimizer, IslandOptimizer):
        _validate_island(model, optimizer, config)
        return
    size = torch.distributed.get_world_size(model.process_group)
    if size != (world_size := torch.distributed.get_world_size()):
        raise UsageError(
            f"the model averages over {size} ranks, but the Trainer splits data and checkpoints over all {world_size}; "
            "wrap the model without process_group, or write a plain loop"
        )


def _validate_island(model: DistributedDataParallel, optimizer: IslandOptimizer, config: TrainConfig) -> None:
    kind, islands = type(optimizer).__name__, optimizer.islands
    ranks, island = torch.distributed.get_process_group_ranks(model.process_group), islands.members[islands.number]
    if ranks != island:
        raise UsageError(
            f"the model averages over the ranks {ranks}, but its island in {kind} has the ranks {island}; wrap the "
            f"model over an island, DistributedDataParallel(net, device_mesh=mesh['inside']), and give {kind} the same "
            "wrapper"
        )
    refused = {
        "on_lost_island='continue', because all ranks save and evaluate together": islands.goes_on,
        "virtual_ranks, because islands have different weights": model.virtual_ranks is not None,
        "load_best_at_end, because a checkpoint holds the weights of each island": config.load_best_at_end,
    }
    for what, is_set in refused.items():
        if is_set:
            raise UsageError(f"the Trainer cannot train with {kind} and {what}; leave it out, or write a plain loop")


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
