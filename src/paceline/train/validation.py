"""Requirements of the Trainer and of evaluate(), checked before work starts; a message is one line with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.output.wording import with_article
from paceline.core.state.unwrapping import unwrap
from paceline.data import DataLoader, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.optim import ShardedOptimizer
from paceline.train.config import TrainConfig, check_settings, plain_metric


def validate_config(config: Any, loss: Any) -> None:
    """Check that `config` is a TrainConfig and `loss` is callable.

    Raises:
        UsageError: if one is not; names its type.
    """
    if not isinstance(config, TrainConfig):
        raise UsageError(f"config must be a TrainConfig, not {_described(config)}: TrainConfig(epochs=3)")
    if not callable(loss):
        raise UsageError(f"loss must be a function loss(model, batch), not {_described(loss)}")


def validate_wrapper(model: Any, caller: str) -> None:
    """Check that `model` is wrapped by Paceline's class; it may be compiled with ``torch.compile``.

    Raises:
        UsageError: if it is not; names its class and the remedy.
    """
    # torch.compile(model) is another module, which holds the wrapper under this name.
    inner = getattr(model, "_orig_mod", model)
    # Ours first, because it is a subclass of torch's.
    if isinstance(inner, DistributedDataParallel):
        return
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        remedy = "import DistributedDataParallel from paceline instead of from torch"
    elif isinstance(inner, nn.Module):
        remedy = "wrap it first: paceline.DistributedDataParallel(model)"
    else:
        remedy = "give paceline.DistributedDataParallel(model)"
    raise UsageError(f"{caller} needs a model in Paceline's wrapper, not {_described(inner)}; {remedy}")


def validate_loader(loader: Any, owner: str) -> None:
    """Check that `loader` is Paceline's and its epochs have a length.

    Raises:
        UsageError: if not; names its class and the remedy.
    """
    if not isinstance(loader, DataLoader):
        remedy = "give paceline.data.DataLoader(dataset, batch_size=…), with the batch size of all ranks together"
        if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size:
            remedy += f" (it has {loader.batch_size} on each rank now)"
        raise UsageError(f"{owner} needs Paceline's DataLoader, not {_described(loader)}; {remedy}")


def validate_training_loader(loader: Any, config: TrainConfig) -> None:
    """Check that the Trainer can train on `loader`.

    Raises:
        UsageError: for another kind of loader, or a stream without ``max_steps``.
    """
    validate_loader(loader, "the Trainer")
    if isinstance(loader.progress, GlobalBatchStream) and config.max_steps is None:
        raise UsageError("the length of a stream is not known; give TrainConfig max_steps in place of epochs")


def share_virtual_ranks(config: TrainConfig, model: DistributedDataParallel, loaders: Iterable[DataLoader]) -> None:
    """Tell the model and all `loaders` the number of virtual ranks that one of them, or the config, has.

    Raises:
        UsageError: if they have different ones, or one of them does not go with it.
    """
    loaders = list(loaders)
    given = [config.virtual_ranks, model.virtual_ranks, *(loader.virtual_ranks for loader in loaders)]
    if (count := next((each for each in given if each is not None), None)) is None:
        return
    # Again, because the config did not know a number that comes with the model or a loader.
    check_settings({**vars(config), "virtual_ranks": count})
    for loader in loaders:
        loader.use_virtual_ranks(count)
    model.use_virtual_ranks(count)


def wanted_metrics(config: TrainConfig, scheduler: Any, callbacks: Iterable[Any]) -> dict[str, str]:
    """Return the metrics of the evaluation that a run depends on, by a description of who names them."""
    wanted = {} if config.keep_best is None else {"keep_best": config.keep_best}
    if isinstance(scheduler, ReduceLROnPlateau):
        wanted["monitor, which the ReduceLROnPlateau follows,"] = config.monitor
    for callback in callbacks:
        if isinstance(metric := getattr(callback, "monitor", None), str):
            wanted[f"the monitor of {type(callback).__qualname__}"] = plain_metric(metric)
    return wanted


def validate_evaluated(config: TrainConfig, evaluation: Any, wanted: Mapping[str, str]) -> None:
    """Check that there is an evaluation if one is asked for, and that it has the metrics that are `wanted`.

    Raises:
        UsageError: names who asks for which metric, and those that there are.
    """
    if evaluation is None:
        for who, metric in wanted.items():
            raise UsageError(f"{who} is {metric!r}, but there is no evaluation; give Trainer(…, evaluation=…)")
        if config.evaluate_every is not None:
            raise UsageError("evaluate_every is given, but there is no evaluation; give Trainer(…, evaluation=…)")
    elif evaluation.derive is None:
        validate_metrics(wanted, evaluation.names)


def validate_metrics(wanted: Mapping[str, str], metrics: Iterable[str]) -> None:
    """Check that an evaluation's `metrics` have those that are `wanted`.

    Raises:
        UsageError: names who asks for which, and lists those that there are.
    """
    known = sorted(metrics)
    for who, metric in wanted.items():
        if metric not in known:
            raise UsageError(
                f"{who} is {metric!r}, but the evaluation has {', '.join(map(repr, known))}; name one of them"
            )


def validate_loggers(loggers: Any) -> None:
    """Check that `loggers` is a list of loggers.

    Raises:
        UsageError: if it is not; names its type, and the method of a logger.
    """
    remedy = "give a list of objects with a method write(step, values)"
    if not isinstance(loggers, list | tuple):
        raise UsageError(f"loggers is {_described(loggers)}; {remedy}")
    for logger in loggers:
        if not callable(getattr(logger, "write", None)):
            raise UsageError(f"{_described(logger)} is no logger; {remedy}")


def validate_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that `optimizer` is an optimizer, not LBFGS, and has parameters of the model.

    Raises:
        UsageError: if it is not; names the problem.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the Trainer needs a torch.optim.Optimizer, not {_described(optimizer)}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "the Trainer calls step() without a closure, which LBFGS needs; use another optimizer, or a loop of your "
            "own with optimizer.step(closure), whose closure returns paceline.mean_over_ranks(loss)"
        )
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise UsageError(
            "the optimizer has none of the model's parameters, so training would change nothing; make it from this "
            "model: torch.optim.SGD(model.parameters(), …)"
        )


def shared_out(
    optimizer: torch.optim.Optimizer, scheduler: Any, model: DistributedDataParallel, config: TrainConfig
) -> torch.optim.Optimizer:
    """Return the sharded optimizer that takes the place of `optimizer` if `config` says so; all ranks call this.

    Raises:
        UsageError: if it cannot be sharded, or a `scheduler` was made for it already.
    """
    if not config.sharded or isinstance(optimizer, ShardedOptimizer):
        return optimizer
    if scheduler is not None:
        raise UsageError(
            "with sharded=True the scheduler has to be of the sharded optimizer; give the Trainer "
            "paceline.optim.ShardedOptimizer(…) and a scheduler that was made from it"
        )
    return ShardedOptimizer.of(optimizer, model.process_group)


def validate_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
    """Refuse an object that cannot step after every optimizer step, another optimizer's, and a second schedule.

    Raises:
        UsageError: says which.
    """
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"scheduler must be one of torch.optim.lr_scheduler, not {_described(scheduler)}; it is stepped "
            "after every optimizer step, a ReduceLROnPlateau after every evaluation"
        )
    if scheduler.optimizer is not optimizer:
        raise UsageError("the scheduler is of another optimizer than the Trainer's; make it from this one")
    if config.warmup_steps or config.decay != "none" or config.lr_scaling != "none":
        raise UsageError(
            "the Trainer was given a scheduler and, by warmup_steps, decay or lr_scaling, a schedule of its own; leave "
            "one of the two out"
        )


def check_same_world(model: DistributedDataParallel) -> None:
    """Refuse a model that averages over a part of the world, because data and checkpoints are split over all of it.

    Raises:
        UsageError: names both sizes.
    """
    size = torch.distributed.get_world_size(model.process_group)
    if size != (world_size := torch.distributed.get_world_size()):
        raise UsageError(
            f"the model averages over {size} ranks but the world has {world_size}, over all of which the Trainer "
            "splits the data and writes checkpoints; wrap the model without process_group, or write a plain loop"
        )


def check_shared_buffers(model: DistributedDataParallel) -> None:
    """Refuse to checkpoint buffers that differ between ranks.

    Raises:
        UsageError: names one of them.
    """
    size = torch.distributed.get_world_size(model.process_group)
    buffers = unwrap(model).state_dict().keys() & dict(unwrap(model).named_buffers()).keys()
    if size > 1 and buffers and not model.forward_sync_buffers:
        raise UsageError(
            f"with broadcast_buffers=False every rank has buffers of its own ({min(buffers)!r}, say), but a "
            "checkpoint holds rank 0's; leave it out, or checkpoint_dir"
        )


def summed_loss(returned: Any) -> tuple[Tensor, float]:
    """Return the loss and the weight that a loss function has `returned`, checked.

    Raises:
        UsageError: if they are not a number to differentiate and a number.
    """
    remedy = "return the loss summed over the micro-batch, and the number of samples or tokens it sums over"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UsageError(
            f"the loss function returned {_described(returned)} instead of two values; {remedy}: "
            'F.cross_entropy(model(x), y, reduction="sum"), len(y)'
        )
    loss, weight = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"the loss function returned {_described(loss)} as the loss; {remedy}")
    if not loss.requires_grad:
        raise UsageError(
            "the loss function returned a loss without a gradient; compute it from model(x), without torch.no_grad(), "
            ".item() or .detach()"
        )
    # A bool would pass for a number.
    if isinstance(weight, bool) or (isinstance(weight, Tensor) and weight.numel() != 1) or not _is_number(weight):
        raise UsageError(f"the loss function returned {_described(weight)} as the weight; {remedy}")
    return loss, weight


def summed_metrics(returned: Any, names: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    """Return the sums by name, and the number of samples, that an evaluation's function has `returned`, checked.

    Raises:
        UsageError: if they are something else, or have other names than `names`.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], dict):
        raise UsageError(
            f"the evaluation's sums returned {_described(returned)}; return the sum of each metric over the batch by "
            'name, and the number of samples: {"loss": loss.sum()}, len(y)'
        )
    sums, count = returned
    if set(sums) != set(names):
        raise UsageError(f"the evaluation gave {sorted(sums)}, but its names are {sorted(names)}")
    for name, value in [*sums.items(), ("the number of samples", count)]:
        if not _is_number(value) or (isinstance(value, Tensor) and value.numel() != 1):
            raise UsageError(f"the evaluation gave {_described(value)} as {name!r}; sum it over the batch's samples")
    return sums, count


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__float__")


def _described(value: Any) -> str:
    value_type = type(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = (
        value_type.__qualname__
        if value_type.__module__ == "builtins"
        else f"{value_type.__module__}.{value_type.__qualname__}"
    )
    return with_article(name)
