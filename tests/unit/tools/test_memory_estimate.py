"""``paceline estimate-memory``: estimates match the bytes that ranks hold, and mistakes are one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import paceline
from insides import Batch, BuiltModel, activations_of, footprints, heap, sharding, under_way
from json_page import check
from paceline import World
from paceline.errors import installing
from paceline.optim import ShardedOptimizer
from twins import Pools

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_attention_heads": 15,
    "num_hidden_layers": 32,
    "num_key_value_heads": 5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


# -- the optimizer's state ---------------------------------------------------------------------------------------------


def held(state: Any) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


OPTIMIZERS = ("Adam+amsgrad", "sgd", "SGD+momentum+nesterov", "adafactor", "adamw+fused", "asgd")


@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_scales_from_a_tiny_parameter(text: str, dtype: torch.dtype) -> None:
    trial = footprints.parse_optimizer(text)
    for shape in ((), (33,), (48, 7), (7, 7), (4, 1, 3), (8, 3, 5, 5), (0,)):
        if text == "adafactor" and 0 in shape:
            continue  # it divides by the number of elements
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        parameter.grad = torch.ones(shape, dtype=dtype)
        optimizer: Any = trial.optimizer_class([parameter], **trial.options)
        optimizer.step()
        assert trial.nbytes(shape, dtype) == held(optimizer.state), shape


def test_optimizer_that_cannot_train_a_parameter_is_refused() -> None:
    cases: Any = (("muon", (3,), "1 dimension in"), ("lbfgs", (3, 2), "LBFGS"), ("sparseadam", (2,), "dense gradients"))
    for text, shape, said in cases:
        with pytest.raises(paceline.UsageError, match=said):
            footprints.parse_optimizer(text).nbytes(shape, torch.float32)


# -- memory of ranks ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes: tied, frozen, in two dtypes, with buffers, and larger than a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(301, 129)
        self.layers = nn.ModuleList(nn.Linear(129, 129) for _ in range(3))
        self.norm = nn.BatchNorm1d(129)
        self.frozen = nn.Linear(129, 129).requires_grad_(False)
        self.head = nn.Linear(129, 301, bias=False)
        self.head.weight = self.tokens.weight
        self.wide = nn.Linear(301, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens).mean(1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        estimated: Tensor = self.wide(self.head(self.frozen(self.norm(hidden))).double())
        return estimated


def elements(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(301, (6, 4), generator=generator)), torch.zeros(6).long()).backward()
        optimizer.step()


def bytes_with_paceline(world: World, kind: type, sharding: dict[str, Any] | None) -> Any:
    """Return this rank's bytes of weights, gradients, optimizer state and buckets."""
    model = paceline.DistributedDataParallel(Net())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = kind(trained) if sharding is None else ShardedOptimizer(trained, kind, **sharding)
    train(model, optimizer, world.rank)
    state = held(optimizer.local_state()["state"] if sharding is not None else optimizer.state)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    weights = elements(model.parameters()) + elements(model.buffers())
    buckets = model.gradient_bytes_per_step
    return weights, elements(gradients), state, buckets


def row(training: footprints.Training, ranks: int, strategy: str) -> footprints.Footprint:
    return next(entry for entry in training.footprints(ranks) if entry.strategy == strategy)


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adafactor": (torch.optim.Adafactor, {"by": "tensor"}),
}


@pytest.mark.parametrize("text", CASES)
def test_ranks_hold_the_estimated_bytes(pools: Pools, text: str) -> None:
    kind, how = CASES[text]
    training = footprints.Training(Net(), footprints.parse_optimizer(text))
    ours = row(training, 2, footprints.SHARDED)
    states = [training.state_bytes(parts) for parts in training.sharded_parts(2)[0]]
    estimated = pools.run(2, bytes_with_paceline, kind, how)
    gradients = training.gradient_bytes
    assert estimated == [
        (ours.weights, gradients, state, gradients) for state in states
    ]  # gradients are views of the buckets
    assert ours.state == max(states)
    plain = row(training, 2, footprints.DDP)
    expected = (plain.weights, plain.gradients, plain.state, plain.gradients)
    assert pools.run(2, bytes_with_paceline, kind, None) == [expected] * 2


def fsdp2_module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33), nn.BatchNorm1d(33))


def bytes_with_fsdp2(world: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    module, mesh = fsdp2_module(), init_device_mesh("cpu", (world.size,))
    for part in (*module, module):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(5, 33)).square().mean().backward()
    optimizer.step()

    def local(tensors: Any) -> int:
        return elements(tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)

    state = (tensor for entry in optimizer.state.values() for tensor in entry.values())
    gradients = (parameter.grad for parameter in module.parameters())
    return local(module.parameters()) + elements(module.buffers()), local(gradients), local(state)


def test_first_fsdp2_rank_holds_the_estimated_bytes(pools: Pools) -> None:
    footprint = row(footprints.Training(fsdp2_module(), footprints.parse_optimizer("adamw")), 2, footprints.FSDP2)
    estimated = pools.run(2, bytes_with_fsdp2)
    assert estimated[0] == (footprint.weights, footprint.gradients, footprint.state)
    assert all(second <= first for first, second in zip(*estimated, strict=True))


def staged_at_a_time(world: World) -> tuple[int, int, bool]:
    """Return the peak number of pending all-gathers, their total, and whether the parameters are right."""
    capacity, sharding.CAPACITY = sharding.CAPACITY, 64  # type: ignore[attr-defined]
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        group = dist.new_group(backend="gloo")
        optimizer = ShardedOptimizer(model, torch.optim.SGD, process_group=group, lr=0.5)
    finally:
        sharding.CAPACITY = capacity  # type: ignore[attr-defined]
    channel = optimizer.channel
    assert channel is not None
    gather, counts = channel.all_gather, []

    def counted(flat: Tensor) -> Any:
        launched = gather(flat)
        counts.append(under_way(channel))
        return launched

    channel.all_gather = counted  # type: ignore[method-assign]
    original = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    is_right = all(torch.equal(old - 0.5, new) for old, new in zip(original, model.parameters(), strict=True))
    return max(counts), len(counts), is_right


def test_parameters_are_gathered_at_most_four_segments_at_a_time(pools: Pools) -> None:
    # Gathering all at once needed buffers as large as the parameters, half of what sharding Adam saves on many ranks.
    assert pools.run(2, staged_at_a_time) == [(4, 7, True)] * 2


def test_strategy_buffers_are_small_unless_they_copy_everything() -> None:
    module = nn.Sequential(*[nn.Linear(2048, 2048, device="meta") for _ in range(16)])  # 256 MiB
    training = footprints.Training(module, footprints.parse_optimizer("adamw"))
    ours, sharded, torchs, fsdp2 = (
        row(training, 4, name) for name in (footprints.DDP, footprints.SHARDED, footprints.TORCH_DDP, footprints.FSDP2)
    )
    assert torchs.communication == training.gradient_bytes
    assert ours.communication < 40 * 2**20
    assert sharded.communication == 5 * ours.communication  # parameters and gradients are split in the same way
    assert fsdp2.communication == 2 * 2 * (2048 * 2048 + 2048) * 4  # weights and gradients of two layers
    unequal = footprints.Training(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)), footprints.parse_optimizer("adamw")
    )
    assert row(unequal, 4, footprints.FSDP2).communication == 2 * (144 + 136) * 4  # the two largest layers
    assert all(
        row(training, 1, name).communication == 0 for name in (footprints.DDP, footprints.SHARDED, footprints.FSDP2)
    )
    peaks = [entry.peak("cpu", 4, 0) for entry in (torchs, ours, sharded, fsdp2)]
    assert peaks == sorted(peaks, reverse=True)


# -- activations -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50, bias=False)
        self.out.weight = self.tokens.weight
        self.scale = torch.ones(32)  # an attribute, not a buffer

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) * self.scale
        q, k, v = self.qkv(hidden).view(*tokens.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(hidden.shape)
        estimated: Tensor = self.out(F.dropout(F.gelu(mixed + hidden), 0.1))
        return estimated


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None = False) -> None:
        super().__init__()
        self.first, self.use_reentrant = nn.Linear(64, 64), use_reentrant
        wide = (nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64)) for _ in range(4))
        self.layers = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            sequence: Tensor = checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
            return sequence
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        estimated: Tensor = self.head(self.lstm(x)[0][:, -1])
        return estimated


def pictures() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))


def measured_for_real(module: nn.Module, x: Tensor, autocast: torch.dtype | None) -> int:
    """Return the peak of the memory that a real step allocates, without the gradients of weights."""
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    cast: Any = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with torch.profiler.profile(profile_memory=True) as profiler:
        with cast:
            output = module.train()(x)
            logits = output.flatten(0, -2)
            same = output.shape == x.shape
            loss = F.mse_loss(output, torch.zeros_like(output)) if same else F.cross_entropy(logits, zeros(len(logits)))
        loss.backward()
    profiled: Any = profiler.profiler
    changes = [event.nbytes() for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    return x.nbytes + int(max(accumulate(changes)))


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (Attention, Batch((8, 64), True)),
        (Checkpointed, Batch((256, 64))),
        (partial(Checkpointed, True), Batch((256, 64))),
        (partial(Checkpointed, None), Batch((256, 64))),
        (pictures, Batch((64, 3, 8, 8))),
    ],
    ids=["attention", "checkpointed", "reentrant", "sequential", "pictures"],
)
def test_activations_match_the_memory_of_a_real_step(
    build: Callable[[], nn.Module], batch: Batch, autocast: torch.dtype | None
) -> None:
    real = measured_for_real(build(), zeros(512).view(8, 64) if batch.is_tokens else torch.ones(batch.shape), autocast)
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = BuiltModel("net", build())
        estimated = activations_of(model, batch, autocast, on_gpu=False)
        assert estimated.total == pytest.approx(real, rel=0.15)


def test_impossibly_large_batch_can_be_estimated() -> None:
    with torch.device("meta"):
        model = BuiltModel("wide", nn.Linear(2**20, 2**20))
    estimated = activations_of(model, Batch((2**20, 2**20)), None, on_gpu=False)
    assert 4 * 2**42 < estimated.total < 6 * 2**42


def test_lstm_counts_the_tensors_saved_by_its_kernel() -> None:
    # The real kernel keeps the gates of every step in a private workspace that no hook sees.
    estimated = activations_of(BuiltModel("lstm", Recurrent()), Batch((5, 7, 16)), None, on_gpu=False)
    assert estimated.total > 5 * 7 * 4 * 8 * 4


def test_hole_is_too_small_for_the_same_size_until_small_objects_are_gone() -> None:
    memory = heap.Heap()
    memory.allocate(100_000)
    hole, _ = memory.allocate(50_000), memory.allocate(100_000)
    memory.free(hole)
    before = memory.peak
    memory.free(memory.allocate(40_000))
    assert memory.peak == before
    memory.allocate(50_000)
    after = memory.peak
    assert after > before
    memory.drop_small_objects()
    memory.allocate(50_000)
    assert memory.peak == after


def test_one_bucket_holds_all_gradients_that_fit() -> None:
    # The first bucket of 1 MiB exists only for models that need several buckets.
    module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    training = footprints.Training(module, footprints.parse_optimizer("sgd"))
    assert row(training, 2, footprints.DDP).communication == training.gradient_bytes


# -- the command -------------------------------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn
print("imported")

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 4)

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        print("built")
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)

class Factory:
    @staticmethod
    def make():  # with shared weights
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
        model[1].weight = model[0].weight
        return model

class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

def lazy():
    return nn.Sequential(nn.LazyLinear(4))

def sparse():
    return nn.Embedding(5, 3, sparse=True)

def initialized():
    model = lazy()
    model(torch.ones(2, 8))
    return model

def ends():
    raise SystemExit(3)

class Masks(Small):
    def forward(self, x):
        return self.layers(x[x.sum(1) > 0])

@torch.library.custom_op("zoo::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

class Twice(Small):
    def forward(self, x):
        return self.layers(twice(x))

built = nn.Linear(3, 2, bias=False)
two = lambda: (Small(), 1)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, used as the working directory of commands."""
    (tmp_path / "zoo.py").write_text(MODELS)
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


REFUSED = {
    "no ranks": (["zoo.py:Small", "--nproc", "2,0"], "--nproc=2,0 is not a comma-separated list of positive numbers"),
    "no length": (["zoo.py:Small", "--batch-size", "2"], "a batch needs either --sequence-length"),
    "wrong shape": (["zoo.py:Small", "--input-shape", "3,x"], "--input-shape=3,x"),
    "missing file": (["none.py:Small"], "none.py:Small cannot be built: ModuleNotFoundError"),
    "file alone": (["zoo.py"], "model.py:build"),
    "both inputs": (["zoo.py:Small", "--sequence-length", "2", "--input-shape", "16"], "give one of them"),
    "wrong width": (["zoo.py:Small", "--input-shape", "17"], "zoo.py:Small with a batch of shape (1, 17)"),
    "forward that masks": (["zoo.py:Masks", "--input-shape", "16"], "the model reads values of tensors"),
    "other operator": (["zoo.py:Twice", "--input-shape", "16"], "this operator has no implementation for tensors"),
    "unknown device": (["zoo.py:Small", "--device", "tpu"], "--device must be cpu or cuda, not 'tpu'"),
    "unknown optimizer": (["zoo.py:Small", "--optimizer", "adamx"], "--optimizer must be adadelta, adafactor"),
    "unknown option": (["zoo.py:Small", "--optimizer", "adamw+momentum"], "an option of --optimizer adamw must be lr"),
    "a value": (["zoo.py:Small", "--optimizer", "sgd+momentum=0.8"], "or fused, not 'momentum=0.8'"),
    "autocast alone": (["zoo.py:Small", "--autocast", "bfloat16"], "--autocast changes only activations"),
    "checkpointing alone": (["config.json", "--checkpointing"], "--checkpointing changes only activations"),
    "own checkpointing": (
        ["zoo.py:Small", "--checkpointing", "--input-shape", "16"],
        "zoo.py:Small does not support --checkpointing, which is for models of Hugging Face; omit it",
    ),
    "operator": (
        ["zoo.py:Twice", "--input-shape", "16"],
        "zoo::twice",
    ),
    "arguments": (["zoo.py:Net"], "missing 1 required positional argument: 'width'"),
    "no module": (["zoo:two"], "zoo:two cannot be built: AttributeError: 'tuple' object has no attribute"),
    "ends": (["zoo:ends"], "SystemExit: 3"),
    "lazy": (["zoo:lazy"], "zoo:lazy cannot be built: ValueError: Attempted to use an uninitialized parameter"),
    "sparse": (["zoo:sparse"], "the model has layers with sparse gradients, whose size depends on the data"),
    "buffers alone": (["zoo:Buffers"], "no parameter that requires a gradient"),
    "other folder": (["other"], "'other' is not a model"),
    "no such path": (["./no/model"], "'./no/model' is neither a folder nor the name of a model"),
    "offline": (["org/name"], "the configuration of org/name is not on this machine, and HF_HUB_OFFLINE is set"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("models")
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("estimate-memory", *arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line not in ("imported", "built")]
    assert (out, len(lines)) == ("", 1), err
    assert lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.usefixtures("models")
def test_missing_transformers_error_says_how_to_install_it(refusal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refusal("estimate-memory", "config.json")
    assert f"needs the package 'transformers', which is not installed; {installing('recipes')}" in said


@pytest.fixture
def estimate(models: Path, run: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def estimate(*arguments: str) -> Any:
        assert not run("estimate-memory", *arguments, "--json")
        document = json.loads(capsys.readouterr().out)
        check("paceline estimate-memory --json", document)
        return document

    return estimate


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("zoo.py:Small", 676), ("zoo:Small", 676), ("zoo:Factory.make", 40), ("zoo:built", 6), ("zoo:initialized", 36)],
)
def test_models_come_from_classes_functions_and_instances(estimate: Any, model: str, parameters: int) -> None:
    estimated = estimate(model, "--nproc", "3", "--optimizer", "sgd")
    assert estimated["parameters"] == parameters
    plain = next(entry for entry in estimated["ranks"] if entry["strategy"] == footprints.DDP)
    assert (plain["nproc"], plain["state"], plain["activations"]) == (3, 0, None)
    assert (plain["weights"], plain["gradients"]) == (4 * parameters, 4 * parameters)


def test_totals_are_sums_and_dtypes_follow_the_options(estimate: Any) -> None:
    options = ("--dtype", "bfloat16", "--input-shape", "16", "--batch-size", "8")
    estimated = estimate("zoo.py:Small", "--nproc", "4,1", *options)
    assert next(iter(estimated)) == "version"
    assert [entry["nproc"] for entry in estimated["ranks"]] == [1] * 4 + [4] * 4
    for entry in estimated["ranks"]:
        parts = ("weights", "gradients", "state", "communication", "activations")
        assert entry["peak"] > sum(entry[part] for part in parts)
        assert entry["activations"] > 2 * 8 * (16 + 32 + 4)  # inputs of both layers, and the output
    plain, sharded, fsdp2 = (
        next(entry for entry in estimated["ranks"] if (entry["nproc"], entry["strategy"]) == (4, name))
        for name in (footprints.DDP, footprints.SHARDED, footprints.FSDP2)
    )
    assert (plain["weights"], plain["state"]) == (2 * 676, 2 * 2 * 676 + 4 * 4)
    assert sharded["weights"] == 2 * 676
    assert fsdp2["weights"] == 2 * 676 / 4
    assert plain["state"] / 4 < sharded["state"] < plain["state"] / 2  # the 128 elements are not sharded


def test_checkpointing_of_a_hugging_face_model_needs_less(estimate: Any) -> None:
    def activations(*options: str) -> int:
        return int(estimate("config.json", "--sequence-length", "64", *options)["ranks"][0]["activations"])

    tiny = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    Path("config.json").write_text(json.dumps({**SMOLLM2, **tiny, "vocab_size": 50, "num_hidden_layers": 8}))
    assert activations("--checkpointing") < activations() / 3
    assert activations("--checkpointing", "--autocast", "bfloat16") < activations("--autocast", "bfloat16") / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixture_of_experts_has_activations(estimate: Any, dtype: str) -> None:
    # torch implements its grouped matrix multiplication for fake tensors only in bfloat16.
    tiny = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    Path("config.json").write_text(json.dumps({**tiny, **mixtral, "vocab_size": 50, "num_key_value_heads": 2}))
    estimated = estimate("config.json", "--sequence-length", "64", "--dtype", dtype)
    assert estimated["ranks"][0]["activations"] > 2 * 64 * 2 * 256 * 2  # two experts for each token, in two layers


@pytest.mark.usefixtures("models")
def test_output_states_how_many_measured_peaks_were_near(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    results = max((Path(__file__).parents[3] / "benchmarks" / "results").glob("*-memory-estimate.json"))
    groups = json.loads(results.read_text())["results"]["summary"].values()
    good, count = (sum(group[name] for group in groups) for name in ("good", "of"))
    assert not run("estimate-memory", "zoo.py:Small")
    lowest, highest = min(group["lowest_ratio"] for group in groups), max(group["highest_ratio"] for group in groups)
    others = f"the others at most {100 - 100 * lowest:.0f}% too low or {100 * highest - 100:.0f}% too high"
    out = " ".join(capsys.readouterr().out.split())
    assert f"On a CPU, {good} of {count} estimates were within 15% of the measured peak, {others}" in out
