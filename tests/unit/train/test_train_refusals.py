"""Setups that the Trainer refuses before training, and the absence of GPU synchronization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from device_watch import queued_operations
from insides import TorchDispatchMode
from paceline.core.world import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.train import Evaluation, TrainConfig, Trainer, evaluate
from trainings import Points, Settings, refusal, squared_error, squared_loss
from twins import Pools


def trainer(model: DistributedDataParallel, samples: int = 16, evaluation: Any = None, **config: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Points(samples, torch.float32), 4)
    given = Settings(**{"epochs": 1, "log_every": 1000, **config})
    evaluated = evaluation(loader) if evaluation else None
    return Trainer(model, optimizer, squared_loss, loader, given, evaluated, **given.objects(optimizer))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))


def sharing(world: World) -> list[str]:
    model = DistributedDataParallel(linear())
    of = [
        lambda loader: loader,
        lambda loader: DataLoader(loader.dataset, batch_sampler=loader.progress),
        lambda loader: DataLoader(loader.dataset, 4),
    ]
    return [
        refusal(trainer, model, evaluation=lambda loader, of=wrap: Evaluation(of(loader), squared_error, ("error",)))
        for wrap in of
    ]


def test_sharing_a_loader_or_sampler_between_training_and_evaluation_is_refused(pools: Pools) -> None:
    # Every evaluation reset the loader to epoch 0, so training never ended.
    [(same, sampler, own)] = pools.run(1, sharing)
    assert same.startswith("training and evaluation share a loader or sampler, ")
    assert (sampler, own) == (same, "")


def in_a_part_of_the_world(world: World) -> str:
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    return refusal(trainer, DistributedDataParallel(linear(), process_group=groups[world.rank]))


def test_model_that_averages_over_part_of_the_world_is_refused(pools: Pools) -> None:
    for message in pools.run(2, in_a_part_of_the_world):
        assert message.startswith("the model averages over 1 ranks, but the Trainer splits data ")


def with_own_buffers(world: World, folder: str | None, module: str = "norm") -> str:
    net = linear() if module == "norm" else nn.Linear(6, 3)
    return refusal(trainer, DistributedDataParallel(net, broadcast_buffers=False), checkpoint_dir=folder)


def test_rank_specific_buffers_are_not_checkpointed_as_those_of_rank_0(pools: Pools, tmp_path: Path) -> None:
    for message in pools.run(2, with_own_buffers, str(tmp_path)):
        assert message.startswith("with broadcast_buffers=False ranks have different buffers (such as '1.num_batches_")
    assert list(tmp_path.iterdir()) == []
    assert pools.run(2, with_own_buffers, None) == ["", ""]
    assert pools.run(1, with_own_buffers, str(tmp_path / "alone")) == [""]
    assert pools.run(2, with_own_buffers, str(tmp_path / "without"), "plain") == ["", ""]


class Reads(TorchDispatchMode):
    """Counts reads of tensor values by the CPU, which would have to wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def reads(world: World) -> list[int]:
    counts = []
    for samples in (4, 40):
        fitted = trainer(DistributedDataParallel(linear()), samples, accumulate=2, check_finite=False)
        with queued_operations(), Reads() as mode:
            fitted.fit()
        counts.append(mode.count)
    return counts


def test_no_tensor_value_is_read_between_two_metrics_lines(pools: Pools) -> None:
    # float(loss) after every micro-batch made the CPU wait for the GPU, as only the NaN check must.
    [(one_batch, ten_batches)] = pools.run(1, reads)
    assert one_batch == ten_batches > 0


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


def usual_mistakes(world: World) -> list[str]:
    model, plain = DistributedDataParallel(linear()), linear()
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), Points(16, torch.float32)
    config, loader = TrainConfig(1), DataLoader(data, 4)
    evaluation = Evaluation(DataLoader(data, 4), squared_error, ("error",))

    def of(model: Any = model, optimizer: Any = optimizer, **more: Any) -> Any:
        given = {"loss": squared_loss, "loader": loader, "config": config, **more}
        return lambda: Trainer(model, optimizer, **given).fit()

    def of_loss(value: Any) -> Any:
        return of(loss=lambda model, batch: value(model(batch[0])), loader=DataLoader(data, 4))

    attempts = [
        of(loader=torch.utils.data.DataLoader(data, 4)),
        of(plain, torch.optim.SGD(plain.parameters(), lr=0.01)),
        of(optimizer=torch.optim.SGD(plain.parameters(), lr=0.01)),
        of(optimizer=torch.optim.LBFGS(model.parameters())),
        of(optimizer=ScheduleFree(model.parameters())),
        of(config={"epochs": 1}),
        of(evaluation=Evaluation(torch.utils.data.DataLoader(data, 4), squared_error, ("error",))),  # type: ignore
        lambda: evaluate(plain, evaluation),  # type: ignore[arg-type]
        lambda: evaluate(model, Evaluation(evaluation.loader, lambda *_: torch.zeros(()), ("error",))),  # type: ignore
        of_loss(lambda out: out.sum()),
        of_loss(lambda out: (out, len(out))),
        of_loss(lambda out: (out.sum().detach(), len(out))),
        of_loss(lambda out: (out.sum(), out)),
    ]
    return [refusal(attempt) for attempt in attempts]


REMEDIES = [
    "the Trainer needs Paceline's DataLoader, not a torch.utils.data.dataloader.DataLoader; give paceline.data.Data",
    "the Trainer needs a model in Paceline's wrapper, not a torch.nn.modules.container.Sequential; wrap it first: ",
    "the optimizer has none of the model's parameters; create it from this model",
    "LBFGS needs step(closure), which the Trainer does not call; use another optimizer, or write a training loop",
    "ScheduleFree needs train() and eval(), which the Trainer does not call; use",
    "config must be a TrainConfig, not a dict: TrainConfig(epochs=3)",
    "Evaluation needs Paceline's DataLoader, not a torch.utils.data.dataloader.DataLoader; give",
    "evaluate() needs a model in Paceline's wrapper, not a torch.nn.modules.container.Sequential; wrap it first",
    "the evaluation's sums returned a tensor of shape (); return sums over the batch by name",
    "the loss function returned a tensor of shape () instead of two values; return the loss summed over the micro-",
    "the loss function returned a tensor of shape (4, 3) as the loss; return the loss summed",
    "the loss function returned a loss without a gradient; compute it from model(x)",
    "the loss function returned a tensor of shape (4, 3) as the weight; ",
]


def test_common_mistakes_are_one_line_with_the_remedy(pools: Pools) -> None:
    # They ended in AttributeError, TypeError and RuntimeError from the middle of the loop.
    [messages] = pools.run(1, usual_mistakes)
    for message, beginning in zip(messages, REMEDIES, strict=True):
        assert message.startswith(beginning)
        assert "\n" not in message
