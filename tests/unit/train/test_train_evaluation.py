"""Evaluations and predictions count every sample exactly once on any number of ranks, and have no side effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from insides import rng_state
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel
from paceline.train import Evaluation, TrainConfig, Trainer, evaluate, predict
from trainings import Points, Run, Stream, digest, net, refusal, squared_loss
from twins import Pools

# Samples and batch sizes: even, uneven last batch, batches smaller than the number of ranks, a single sample.
CASES = [(24, 6), (25, 6), (5, 2), (1, 1)]


def model_of(world: World) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    )


def data_of(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    return TensorDataset(torch.randn(samples, 3, generator=generator, dtype=torch.float64), torch.arange(samples))


def sums(module: nn.Module, batch: Any) -> tuple[dict[str, Tensor], int]:
    x, numbers = batch
    # Powers of two make the sum reveal how often each sample was counted.
    return {"out": module(x).sum(), "which": (2.0 ** numbers.double()).sum()}, len(x)


def evaluated(world: World, samples: int, batch_size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the results of evaluate(), called twice, and of one pass over the data on this rank alone."""
    model = model_of(world)
    data = data_of(samples)
    evaluation = Evaluation(DataLoader(data, batch_size), sums, ("out", "which"))
    state = digest(rng_state())
    metrics = evaluate(model, evaluation)
    assert evaluate(model, evaluation) == metrics
    assert digest(rng_state()) == state
    assert model.training
    model.module.eval()
    with torch.no_grad():
        naive, _ = sums(model.module, data.tensors)
    return metrics, {name: float(value) / samples for name, value in naive.items()}


@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_counts_exactly_once(pools: Pools, size: int) -> None:
    for samples, batch_size in CASES:
        results = pools.run(size, evaluated, samples, batch_size)
        for metrics, naive in results:
            assert metrics["which"] == (2**samples - 1) / samples == naive["which"], (samples, batch_size)
            assert metrics["out"] == pytest.approx(naive["out"], rel=1e-12), (samples, batch_size)
        assert all(metrics == results[0][0] for metrics, _ in results), "ranks differ"


@pytest.mark.ranks(1)
def test_module_in_eval_mode_stays_in_eval_mode(world: World) -> None:
    # Evaluation switched every module to training mode, so frozen statistics were updated afterward.
    model = model_of(world)
    model.train()
    model.module[1].eval()  # frozen statistics
    initial = [part.training for part in model.modules()]
    evaluate(model, Evaluation(DataLoader(data_of(4), 2), sums, ("out", "which")))
    assert initial == [part.training for part in model.modules()]


@pytest.mark.ranks(1)
def test_metrics_without_a_name_are_refused(world: World) -> None:
    message = refusal(evaluate, model_of(world), Evaluation(DataLoader(data_of(4), 2), sums, ("out",)))
    assert message == "the evaluation's sums returned ['out', 'which'], but its names are ['out']"


# -- predictions in dataset order --------------------------------------------------------------------------------------


RUN = Run(TrainConfig(1), dropout=0.5)


class Pair(NamedTuple):
    scores: Tensor
    twice: list[Tensor]


def structured(module: nn.Module, batch: Any) -> Any:
    x, _, indices = batch
    return {"index": indices, "pair": Pair(module(x), [indices, 2 * indices])}


def loader_of(kind: str, samples: int, batch_size: int) -> DataLoader:
    data = Points(samples, RUN.dtype)
    match kind:
        case "shuffled":
            return DataLoader(data, batch_size, shuffle=True, seed=4)
        case "stream":
            return DataLoader(GlobalBatchStream(Stream(data), batch_size))
        case "by cost":
            costs = [1.0 + (7 * index) % 5 for index in range(samples)]
            return DataLoader(data, batch_size, shuffle=True, cost=costs)
        case "repeated":
            order = [index for index in range(samples) for _ in range(1 + index % 2)][::-1]
            return DataLoader(data, batch_sampler=GlobalBatchSampler(data, batch_size, order=order))
        case "with workers":
            return DataLoader(data, batch_size, shuffle=True, num_workers=2)
    return DataLoader(data, batch_size)


def predicted(world: World, kind: str, samples: int, batch_size: int) -> list[Any]:
    model = DistributedDataParallel(net(RUN))
    model.train()
    state = digest(rng_state())
    loader = loader_of(kind, samples, batch_size)
    plain = predict(model, loader)
    rows = predict(model, loader, structured)
    assert model.module.training
    assert digest(rng_state()) == state, "dropout is off, and the random state is unchanged"
    return [plain, rows["index"], rows["pair"].scores, rows["pair"].twice[1]]


def reference(samples: int) -> Tensor:
    with torch.no_grad():
        return net(RUN).eval()(Points(samples, RUN.dtype).x)


@pytest.mark.parametrize(
    ("kind", "samples", "batch_size", "size"),
    [("in order", 2, 8, 3), ("shuffled", 23, 5, 2), ("stream", 23, 5, 3), ("by cost", 23, 5, 2)],
)
def test_rows_match_one_process_in_dataset_order(
    pools: Pools, kind: str, samples: int, batch_size: int, size: int
) -> None:
    for plain, indices, scores, twice in pools.run(size, predicted, kind, samples, batch_size):
        assert indices.tolist() == list(range(samples))
        assert torch.equal(twice, 2 * indices)
        torch.testing.assert_close(plain, reference(samples), rtol=1e-12, atol=0)
        assert torch.equal(plain, scores)


@pytest.mark.parametrize("kind", ["repeated", "with workers"])
def test_rows_repeat_as_often_as_the_sampler_repeats_them(pools: Pools, kind: str) -> None:
    for _, indices, *_ in pools.run(2, predicted, kind, 9, 4):
        twice = [index for index in range(9) for _ in range(1 + (kind == "repeated") * (index % 2))]
        assert indices.tolist() == twice


@pytest.mark.ranks(1)
def test_trainer_predicts_in_its_precision_and_refuses_invalid_loaders(world: World) -> None:
    model = DistributedDataParallel(net(replace(RUN, dtype=torch.float32)))  # autocast leaves float64 alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Points(20, torch.float32)
    rows: list[Any] = []

    class Predicts:
        def on_evaluation(self, run: Any) -> None: ...

        def on_end(self, run: Any) -> None:
            rows.append(trainer.predict(DataLoader(data, 7, shuffle=True)))

    config = TrainConfig(2, precision="bf16")
    trainer = Trainer(model, optimizer, squared_loss, DataLoader(data, 8), config, callbacks=[Predicts()])
    trainer.fit()
    again = trainer.predict(DataLoader(data, 3))
    attempts = (
        lambda: trainer.predict(trainer.loader),
        lambda: trainer.predict(torch.utils.data.DataLoader(data, 3)),  # type: ignore[arg-type]
        lambda: trainer.predict(DataLoader(data, 7), lambda module, batch: module(batch[0]).sum()),
        lambda: trainer.predict(DataLoader(data, 7), lambda module, batch: module(batch[0])[:1]),
        lambda: trainer.predict(DataLoader(data, 7), lambda module, batch: ["one"] * len(batch[0])),
        lambda: trainer.predict(DataLoader(data, 7), lambda module, batch: {}),
        lambda: trainer.predict(DataLoader(data, 7), lambda module, batch: torch.ones(len(batch[0]), len(batch[0]))),
    )
    assert torch.allclose(rows[0], again, rtol=0.02, atol=0.02)
    assert again.dtype == torch.bfloat16
    beginnings = [
        "predict() would change the training's position in its data; give it another DataLoader",
        "predict() needs Paceline's DataLoader, not a torch.utils.data",
        "predict_step returned a Tensor without rows for a batch of 7 samples; return a tensor with one row",
        "predict_step returned 1 rows for a batch of 7 samples; ",
        "predict_step returned a str without rows for a batch of 7 samples; ",
        "predict_step returned a dict without rows for a batch of 7 samples; ",
        "predict_step returned rows of shapes (6,) and (7,); pad them to one shape",
    ]
    for attempt, beginning in zip(attempts, beginnings, strict=True):
        assert refusal(attempt).startswith(beginning)
