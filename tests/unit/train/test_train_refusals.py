"""Setups and values that the Trainer refuses before training, and the absence of GPU synchronization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from device_watch import queued_operations
from insides import TorchDispatchMode, checkpoints
from paceline import World
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointMismatch, UsageError
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


@pytest.mark.ranks(1)
def test_sharing_a_loader_or_sampler_between_training_and_evaluation_is_refused(world: World) -> None:
    # Every evaluation reset the loader to epoch 0, so training never ended.
    model = DistributedDataParallel(linear())
    of = [
        lambda loader: loader,
        lambda loader: DataLoader(loader.dataset, batch_sampler=loader.progress),
        lambda loader: DataLoader(loader.dataset, 4),
    ]
    same, sampler, own = (
        refusal(trainer, model, evaluation=lambda loader, of=wrap: Evaluation(of(loader), squared_error, ("error",)))
        for wrap in of
    )
    assert same.startswith("training and evaluation share a loader or sampler, ")
    assert (sampler, own) == (same, "")


@pytest.mark.ranks(2)
def test_model_that_averages_over_part_of_the_world_is_refused(world: World) -> None:
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    message = refusal(trainer, DistributedDataParallel(linear(), process_group=groups[world.rank]))
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


@pytest.mark.ranks(1)
def test_no_tensor_value_is_read_between_two_metrics_lines(world: World) -> None:
    # float(loss) after every micro-batch made the CPU wait for the GPU, as only the NaN check must.
    counts = []
    for samples in (4, 40):
        fitted = trainer(DistributedDataParallel(linear()), samples, accumulate=2, check_finite=False)
        with queued_operations(), Reads() as mode:
            fitted.fit()
        counts.append(mode.count)
    assert counts[0] == counts[1] > 0


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...
    def eval(self) -> None: ...


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


@pytest.mark.ranks(1)
def test_common_mistakes_are_one_line_with_the_remedy(world: World) -> None:
    # They ended in AttributeError, TypeError and RuntimeError from the middle of the loop.
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
    for attempt, beginning in zip(attempts, REMEDIES, strict=True):
        message = refusal(attempt)
        assert message.startswith(beginning)
        assert "\n" not in message


# -- values, and settings that must match a checkpoint -----------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epochs": 0}, "epochs must be at least 1, not 0"),
    ({"max_steps": 9}, "epochs 1 and max_steps 9 both set the length; give one of them"),
    ({"accumulate": 0}, "accumulate must be at least 1, not 0"),
    ({"log_every": 0}, "log_every must be at least 1, not 0"),
    # These were accepted unchanged: 1.5 epochs trained 2.
    ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
    ({"epochs": True}, "epochs must be a whole number, not True"),
    ({"epochs": None}, "the length of the training is missing; give epochs or max_steps"),
    ({"clip_norm": "1"}, "clip_norm must be a number, not '1'"),
    ({"resume": "false"}, "resume must be True or False, not 'false'"),
    ({"allow_changed_settings": True}, "needs resume"),
    ({"clip_norm": 0.0}, "clip_norm must be a finite number greater than 0, not 0.0"),
    ({"clip_norm": float("nan")}, "clip_norm must be a finite number greater than 0, not nan"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_out_of_range_value_is_refused_when_the_config_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainConfig(**{"epochs": 1, **options})


OTHER: list[tuple[str, dict[str, Any], str]] = [
    ("accumulate", {"accumulate": 2}, "accumulate=1, but this run has accumulate=2"),
    ("clip_norm", {"clip_norm": 1.0}, "clip_norm=None, but this run has clip_norm=1.0"),
    ("precision", {"precision": "bf16"}, "precision='fp32', but this run has precision='bf16'"),
]


@pytest.mark.parametrize(("name", "options", "message"), OTHER, ids=[name for name, *_ in OTHER])
def test_checkpoint_with_other_settings_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    saved = checkpoints.Settings(TrainConfig(epochs=2), batch_size=8).state_dict()
    with pytest.raises(CheckpointMismatch, match=message):
        checkpoints.Settings(TrainConfig(epochs=2, **options), batch_size=8).check_state_dict(saved)


def test_run_may_be_extended_and_change_its_logging() -> None:
    saved = checkpoints.Settings(TrainConfig(epochs=2, log_every=1)).state_dict()
    checkpoints.Settings(TrainConfig(epochs=9, resume=True)).check_state_dict(saved)


def test_batch_size_can_never_change() -> None:
    saved = checkpoints.Settings(TrainConfig(epochs=2), batch_size=1).state_dict()
    allowed = TrainConfig(epochs=2, resume=True, allow_changed_settings=True)
    with pytest.raises(CheckpointMismatch, match="batch_size=1, but this run has batch_size=2; resume with the same"):
        checkpoints.Settings(allowed, batch_size=2).check_state_dict(saved)
