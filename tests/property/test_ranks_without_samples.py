"""Loops without special cases equal one process even if the last batch has fewer samples than ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

import paceline
from paceline import World
from paceline.data import DataLoader, GlobalBatchSampler, GlobalBatchStream
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import UsageError
from paceline.nn import SyncBatchNorm
from paceline.train import Evaluation, TrainConfig, Trainer, evaluate, predict
from twins import Pools

SAMPLES, BATCH = 10, 8
EPOCHS = 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x.view(-1, 5, 4))[0][:, -1])
        return output


class Lookup(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.table((x.abs() * 5).long().clamp(0, 9)).mean(1))
        return output


class Nan(nn.Module):
    """Produces NaN in gradients and in a buffer for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(20, 5), nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.mean.copy_(hidden.detach().mean(0))
        output: Tensor = self.other(hidden) + 0 * self.other(hidden.mean(0, keepdim=True)).sum()
        return output


def normalized(kind: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 6), kind(6), nn.ReLU(), nn.Linear(6, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(20, 5),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)),
        nn.Conv2d(1, 3, 2),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 5),
    ),
    "layer norm": lambda: normalized(nn.LayerNorm),
    "group norm": lambda: normalized(lambda width: nn.GroupNorm(2, width)),
    "synchronized batch norm": lambda: normalized(nn.BatchNorm1d),
    "lstm": Recurrent,
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(20, 5),
    ),
    "embedding": lambda: Lookup(False),
    "sparse embedding": lambda: Lookup(True),
    "nan": Nan,
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 20, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x[:, :5].argmax(1))


def batches_of(samples: TensorDataset, epoch: int, every: int) -> Iterator[tuple[Tensor, Tensor]]:
    sampler = GlobalBatchSampler(samples, BATCH, rank=0, world_size=1)
    sampler.set_epoch(epoch)
    batches = [torch.tensor(indices) for indices in sampler]
    for at in range(0, len(batches), every):
        yield samples[torch.cat(batches[at : at + every])]


def train(world: World, name: str, every: int, mean: bool) -> None:
    """Train with the loop of the README and in one process on whole batches."""
    torch.manual_seed(0)
    module, samples = MODELS[name]().double(), data()
    twin = copy.deepcopy(module)
    model = DistributedDataParallel(
        SyncBatchNorm.convert_sync_batchnorm(module), unused_parameters="allow", check_finite=True
    )
    optimizer, alone = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, twin))
    loader = DataLoader(samples, BATCH, shuffle=True)
    for epoch in range(EPOCHS):
        total, count = 0.0, 0
        for x, y in accumulate(model, loader, every):
            with model.weight(len(y)):
                loss = F.cross_entropy(model(x), y) * len(y) if mean else F.cross_entropy(model(x), y, reduction="sum")
                loss.backward()
            if model.do_sync:
                optimizer.step()
                optimizer.zero_grad()
            total, count = total + (0 if mean else loss.item()), count + len(y)
        assert paceline.mean_over_ranks(total / max(count, 1), weight=count) >= 0
        for x, y in batches_of(samples, epoch, every):
            F.cross_entropy(twin(x), y).backward()
            alone.step()
            alone.zero_grad()
    buffers = dict(module.named_buffers())
    assert all(bool(buffer.isfinite().all()) for buffer in buffers.values())
    for (key, mine), other in zip(module.state_dict().items(), twin.state_dict().values(), strict=True):
        if key not in buffers or name.startswith("synchronized"):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("ranks", "mean"), [(2, True), (4, False), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_readme_loop_trains_like_one_process(pools: Pools, name: str, ranks: int, mean: bool) -> None:
    pools.run(ranks, train, name, 1, mean)
    if name != "synchronized batch norm":  # its statistics differ between one batch and two micro-batches
        pools.run(ranks, train, name, 2, mean)


# -- other loops -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def summed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def epoch_of(model: DistributedDataParallel, batches: Any) -> None:
    for x, y in accumulate(model, batches, every=5):
        with model.weight(len(y)):
            summed(model, x, y).backward()


def kept_gradients(model: DistributedDataParallel) -> list[int]:
    for number, (x, y) in enumerate(DataLoader(data(), BATCH)):
        if number == 1:  # double the gradient of the first step
            model.module.weight.grad *= 2
        with model.weight(len(y)):
            summed(model, x, y).backward()
    model.module.weight.grad *= 0.5
    return []


def gradients_between_forward_and_backward(model: DistributedDataParallel) -> list[int]:
    for x, y in DataLoader(data(), BATCH):
        with model.weight(len(y)):
            loss = summed(model, x, y)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            loss.backward()
    return [8, 9]


def a_weight_that_is_not_the_number_of_samples(model: DistributedDataParallel) -> list[int]:
    for x, y in DataLoader(data(), BATCH):
        model.zero_grad()
        loss = summed(model, x, y)
        with model.weight(1):  # each rank with samples has one sample
            loss.backward()
    return [8, 9]


def the_last_micro_batch_is_local(model: DistributedDataParallel) -> list[int]:
    loader = DataLoader(data(), BATCH)
    for x, y in loader:
        with model.no_sync(), model.weight(len(y)):
            (F.cross_entropy(model(x), y) * len(y)).backward()
    x, y = next(iter(loader))
    with model.weight(len(y)):
        summed(model, x, y).backward()
    return [*range(SAMPLES), *range(BATCH)]


def the_next_batch_is_fetched_ahead(model: DistributedDataParallel) -> list[int]:
    epoch_of(model, ((x, y) for x, y in DataLoader(data(), BATCH)))
    return [*range(SAMPLES)]


def another_loader_has_samples(model: DistributedDataParallel) -> list[int]:
    for (x, y), (u, v) in zip(DataLoader(data(), BATCH), DataLoader(data(), 4), strict=False):
        model.zero_grad()
        with model.weight(len(y) + len(v)):
            (summed(model, x, y) + summed(model, u, v)).backward()
    return [8, 9, 4, 5, 6, 7]


def a_stream(model: DistributedDataParallel) -> list[int]:
    epoch_of(model, DataLoader(GlobalBatchStream(Stream(), BATCH), num_workers=1))
    return [*range(SAMPLES)]


def a_compiled_model(model: DistributedDataParallel) -> list[int]:
    compiled: Any = torch.compile(model, backend="eager")
    for x, y in accumulate(model, DataLoader(data(), BATCH), every=5):
        with model.weight(len(y)):
            summed(compiled, x, y).backward()
    return [*range(SAMPLES)]


def a_scaled_loss(model: DistributedDataParallel) -> list[int]:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=0.0)
    for x, y in DataLoader(data(), BATCH):
        model.zero_grad()
        with model.weight(len(y)):
            scaler.scale(F.cross_entropy(model(x), y) * len(y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0
    return [8, 9]


def only_two_ranks_have_samples(model: DistributedDataParallel) -> list[int]:
    few = TensorDataset(*(part[:2] for part in data().tensors))
    for x, y in DataLoader(few, BATCH):
        with model.weight(len(y)):
            summed(model, x, y).backward()
    return [0, 1]


def an_evaluation(model: DistributedDataParallel) -> list[int]:
    def sums(module: nn.Module, batch: Any) -> Any:
        return {"loss": F.cross_entropy(module(batch[0]), batch[1]) * len(batch[1])}, len(batch[1])

    x, y = data().tensors
    expected = F.cross_entropy(model.module(x), y).item()
    total = count = 0.0
    with torch.no_grad():
        for inputs, labels in DataLoader(data(), BATCH):
            total, count = total + summed(model, inputs, labels).item(), count + len(labels)
    assert paceline.mean_over_ranks(total / count, weight=count) == pytest.approx(expected)
    metrics = evaluate(model, Evaluation(DataLoader(data(), BATCH), sums, ("loss",)))
    assert metrics["loss"] == pytest.approx(expected)
    torch.testing.assert_close(predict(model, DataLoader(data(), BATCH, shuffle=True)), model.module(x).detach())
    return []


LOOPS = [
    kept_gradients, gradients_between_forward_and_backward, a_weight_that_is_not_the_number_of_samples,
    the_last_micro_batch_is_local, the_next_batch_is_fetched_ahead, another_loader_has_samples, a_stream,
    a_compiled_model, a_scaled_loss, only_two_ranks_have_samples, an_evaluation,
]  # fmt: skip


def compare_loop_with_twin(world: World, loop: Callable[[DistributedDataParallel], list[int]]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(20, 5).double()
    twin = copy.deepcopy(module)
    chosen = loop(DistributedDataParallel(module))
    x, y = data().tensors
    if loop is kept_gradients:
        for indices in (range(BATCH), range(BATCH, SAMPLES)):
            F.cross_entropy(twin(x[[*indices]]), y[[*indices]]).backward()
            if len(indices) == BATCH:
                twin.weight.grad *= 2  # type: ignore[operator]
        twin.weight.grad *= 0.5  # type: ignore[operator]
    elif chosen:
        F.cross_entropy(twin(x[chosen]), y[chosen]).backward()
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_gradients_equal_one_process_in_other_loops(pools: Pools, loop: Any) -> None:
    pools.run(4, compare_loop_with_twin, loop)


class Inverting(nn.Linear):
    """Fails for an empty batch and for constant rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.size(0), -1)
        torch.linalg.inv(x[:, :4].view(-1, 2, 2))
        return super().forward(x)


def forward_empty_batches(world: World) -> str:
    model = DistributedDataParallel(Inverting(20, 5).double())
    message = ""
    for x, _ in DataLoader(data(), BATCH):  # to the end on each rank, because the next model compares positions
        try:
            model(x)
        except UsageError as error:
            message = str(error)
    return message


def test_model_that_fails_on_empty_batches_gets_an_error_with_a_remedy(pools: Pools) -> None:
    first, second, *others = pools.run(4, forward_empty_batches)
    assert first == second == ""
    for rank, message in enumerate(others, start=2):
        assert message.startswith(f"rank {rank} has no samples in this batch, ")
        assert "RuntimeError: cannot reshape tensor of 0 elements" in message
        assert "call model.sync_gradients() instead of forward and backward if loader.slice_is_empty" in message


# -- models that fail on empty batches -------------------------------------------------------------------------------


def transformer(family: str) -> nn.Module:
    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = dict.fromkeys(["hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = AutoConfig.for_model(family, **sizes, **no_dropout, attention_probs_dropout_prob=0.0, num_labels=12)
    model: nn.Module = KINDS[family].from_config(config)
    return model.double().train()


KINDS = {"bert": AutoModelForTokenClassification, "gpt2": AutoModelForCausalLM, "llama": AutoModelForCausalLM}


class Packed(nn.Module):
    """Returns a summed loss and the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 12)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, int]:
        lengths = torch.full_like(input_ids[:, 0], 5) * input_ids.max(1).values.clamp(0, 1)
        packed = nn.utils.rnn.pack_padded_sequence(input_ids[..., None].double(), lengths, batch_first=True)
        return F.cross_entropy(self.lstm(packed)[1][0][-1], input_ids[:, 0], reduction="sum"), len(input_ids)


def mean_loss(model: Any, ids: Tensor, family: str, returns_loss: bool) -> tuple[Tensor, int]:
    if family == "packed":
        loss, count = model(ids)
        return loss / max(count, 1), count
    if returns_loss:
        return model(input_ids=ids, labels=ids).loss, len(ids)
    logits = model(ids).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)), len(logits)


def train_on_stand_ins(world: World, family: str, returns_loss: bool) -> None:
    size = SAMPLES - 1  # leaves one sample for the last batch
    torch.manual_seed(0)
    module = (Packed() if family == "packed" else transformer(family)).double()
    twin, ids = copy.deepcopy(module), torch.randint(1, 12, (SAMPLES, 5))
    model = DistributedDataParallel(module, unused_parameters="allow", check_finite=True)
    for batch, expected in zip(DataLoader(TensorDataset(ids), size), ids.split(size), strict=True):
        model.zero_grad()
        twin.zero_grad()
        with model.weight(len(batch[0])):
            loss, count = mean_loss(model, batch[0], family, returns_loss)
            (loss * count).backward()
        assert count == len(batch[0])
        mean_loss(twin, expected, family, returns_loss)[0].backward()
        for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
            # These models compute partly in float32.
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            assert mean_loss(model, batch[0], family, returns_loss)[1] == count


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("returns_loss", [True, False])
@pytest.mark.parametrize("family", [*KINDS, "packed"])
def test_models_that_fail_on_empty_batches_train_like_one_process(
    pools: Pools, family: str, returns_loss: bool, ranks: int
) -> None:
    pools.run(ranks, train_on_stand_ins, family, returns_loss)


def train_with_trainer(world: World) -> list[Any]:
    torch.manual_seed(0)
    module = SyncBatchNorm.convert_sync_batchnorm(normalized(nn.BatchNorm1d).double())
    model = DistributedDataParallel(module)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y) * len(y), len(y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), BATCH, shuffle=True)
    result = Trainer(model, optimizer, loss, loader, TrainConfig(epochs=EPOCHS, log_every=1)).fit()
    return [*(value.tolist() for value in module.state_dict().values()), result.weight]


def test_trainer_handles_ranks_without_samples_with_sync_batch_norm(pools: Pools) -> None:
    [expected] = pools.run(1, train_with_trainer)
    for mine in pools.run(4, train_with_trainer):
        for ours, alone in zip(mine, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=1e-6, atol=1e-7)
