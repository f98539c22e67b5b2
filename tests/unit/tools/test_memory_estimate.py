"""``paceline estimate-memory``: what it counts is what ranks hold, and mistakes are one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_cli import run
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import paceline
from hub_server import Hub
from insides import under_way
from paceline.core.processes.world import World
from paceline.errors import installing
from paceline.optim import ShardedOptimizer, sharding
from paceline.tools.memory_estimate import hub_models
from paceline.tools.memory_estimate.contents import contents_of
from paceline.tools.memory_estimate.dry_run import DryRun, run_dry
from paceline.tools.memory_estimate.estimate import range_of
from paceline.tools.memory_estimate.kernels import DEVICES
from paceline.tools.memory_estimate.live_bytes import LiveBytes
from paceline.tools.memory_estimate.strategies import (
    DDP,
    FSDP2,
    SHARDED,
    TORCH_DDP,
    Footprint,
    Training,
    held_state,
    plan_of,
)
from paceline.tools.memory_estimate.trial import parse_optimizer
from processes import paceline as command
from twins import Pools

PAGE = Path(__file__).parents[3] / "docs" / "sharded-optimizer.md"
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
TINY = {**SMOLLM2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
TINY |= {"num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 64}


# -- the optimizer's state ---------------------------------------------------------------------------------------------


def held(state: Any) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


OPTIMIZERS = (
    "adamw",
    "Adam+amsgrad",
    "sgd",
    "sgd+momentum",
    "SGD+momentum=0.8+nesterov",
    "adafactor",
    "adagrad",
    "rmsprop+centered+momentum",
    "adamw+fused+betas=(0.9, 0.95)",
    "rprop",
    "asgd",
)


@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_any_shape_follows_from_a_step_on_a_tiny_parameter(text: str, dtype: torch.dtype) -> None:
    trial = parse_optimizer(text)
    for shape in ((), (33,), (48, 7), (7, 7), (4, 1, 3), (8, 3, 5, 5), (0,)):
        if text == "adafactor" and 0 in shape:
            continue  # it divides by the number of elements
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        parameter.grad = torch.ones(shape, dtype=dtype)
        optimizer: Any = trial.optimizer_class([parameter], **trial.options)
        optimizer.step()
        assert trial.nbytes(shape, dtype) == held(optimizer.state), shape


def test_an_optimizer_that_cannot_train_a_parameter_says_so() -> None:
    cases: Any = (("muon", (3,), "1 dimension in"), ("lbfgs", (3, 2), "LBFGS"), ("sparseadam", (2,), "dense gradients"))
    for text, shape, said in cases:
        with pytest.raises(paceline.UsageError, match=said):
            parse_optimizer(text).nbytes(shape, torch.float32)
    with pytest.raises(paceline.UsageError, match="sparse"):
        parse_optimizer("adamw").nbytes((3, 2), torch.float32, "sparse")


# -- what ranks hold ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of odd sizes: tied, frozen, sparse, in two dtypes, with buffers, and more than a bucket of parameters."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(301, 129, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(129, 129) for _ in range(3))
        self.norm = nn.BatchNorm1d(129)
        self.frozen = nn.Linear(129, 129).requires_grad_(False)
        self.head = nn.Linear(129, 301, bias=False)
        if not sparse:
            self.head.weight = self.tokens.weight
        self.wide = nn.Linear(301, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens).mean(1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        found: Tensor = self.wide(self.head(self.frozen(self.norm(hidden))).double())
        return found


def elements(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(301, (6, 4), generator=generator)), torch.zeros(6).long()).backward()
        optimizer.step()


def held_by_ours(world: World, kind: type, options: dict[str, Any], sharding: dict[str, Any] | None, net: Any) -> Any:
    """Weights, gradients, optimizer state and buckets of this rank, in bytes."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    module = Net(net == "sparse")
    if net == "bf16":
        module.to(torch.bfloat16)
        module.wide.to(torch.float64)
    model = paceline.DistributedDataParallel(module)
    optimizer: Any = kind(model.parameters(), **options)
    if sharding is not None:
        optimizer = ShardedOptimizer(model, kind, **sharding, **options)
    train(model, optimizer, world.rank)
    state = held(optimizer.local_state()["state"] if sharding is not None else optimizer.state)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    weights = elements(model.parameters()) + elements(model.buffers())
    buckets = model.gradient_bytes_per_step
    return weights, elements(gradient for gradient in gradients if not gradient.is_sparse), state, buckets


def estimated(text: str, net: str = "plain", master: torch.dtype | None = None) -> Training:
    module = Net(net == "sparse")
    if net == "bf16":
        module.to(torch.bfloat16)
        module.wide.to(torch.float64)
    return Training(contents_of(module, None), parse_optimizer(text), master)


def row(training: Training, ranks: int, strategy: str) -> Footprint:
    return next(each for each in training.footprints(ranks) if each.strategy == strategy)


CASES: dict[str, tuple[str, str, type, dict[str, Any], dict[str, Any]]] = {
    "adamw": ("adamw", "plain", torch.optim.AdamW, {}, {}),
    "momentum": ("sgd+momentum", "plain", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {}),
    "sparse": ("adagrad", "sparse", torch.optim.Adagrad, {}, {}),
    "by tensor": ("adafactor", "plain", torch.optim.Adafactor, {}, {"by": "tensor"}),
    "masters": ("adamw", "bf16", torch.optim.AdamW, {}, {"master_dtype": torch.float32}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_bytes_that_were_estimated(pools: Pools, case: str) -> None:
    text, net, kind, options, how = CASES[case]
    training = estimated(text, net, how.get("master_dtype"))
    ours = row(training, 2, SHARDED)
    states = [held_state(training, pieces) for pieces in plan_of(training, 2).held]
    found = pools.run(2, held_by_ours, kind, options, how, net)
    gradients = training.contents.gradient_bytes
    assert found == [(ours.weights, gradients, state, gradients) for state in states]  # gradients lie in the buckets
    assert ours.state == max(states)
    if case != "masters":  # which a plain optimizer does not keep
        plain = row(training, 2, DDP)
        expected = (plain.weights, plain.gradients, plain.state, plain.gradients)
        assert pools.run(2, held_by_ours, kind, options, None, net) == [expected] * 2


def test_masters_of_frozen_parameters_count_where_they_are_held_alone() -> None:
    # A frozen model with small trained parts was given gradients in the masters' dtype for all of it.
    module = nn.Sequential(nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 4)).to(torch.bfloat16)
    training = Training(contents_of(module, None), parse_optimizer("sgd"), torch.float32)
    frozen, trained = 512 * 513, 4 * 513
    assert row(training, 2, DDP).state == 4 * trained
    ours = row(training, 2, SHARDED)
    assert ours.gradients < 2 * trained + 4 * trained
    assert ours.state > 4 * frozen / 2
    assert row(training, 2, FSDP2).weights == 2 * frozen / 2 + 4 * trained / 2


def held_by_fsdp2(world: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33), nn.BatchNorm1d(33))
    mesh = init_device_mesh("cpu", (world.size,))
    for part in module:
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(5, 33)).square().mean().backward()
        optimizer.step()
    local = [parameter.to_local() for parameter in module.parameters()]  # type: ignore[operator]
    gradients = [parameter.grad.to_local() for parameter in module.parameters()]  # type: ignore[union-attr]
    state = [each for entry in optimizer.state.values() for each in entry.values()]
    locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in state]
    return elements(local) + elements(module.buffers()), elements(gradients), elements(locals_)


def test_the_first_rank_of_fsdp2_holds_the_bytes_that_were_estimated(pools: Pools) -> None:
    module = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 33), nn.BatchNorm1d(33))
    footprint = row(Training(contents_of(module, None), parse_optimizer("adamw")), 2, FSDP2)
    found = pools.run(2, held_by_fsdp2)
    assert found[0] == (footprint.weights, footprint.gradients, footprint.state)
    assert all(second <= first for first, second in zip(*found, strict=True))


def staged_at_a_time(world: World) -> tuple[int, int, bool]:
    """The most gatherings under way, their number, and whether the parameters are right."""
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
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    is_right = all(torch.equal(old - 0.5, new) for old, new in zip(before, model.parameters(), strict=True))
    return max(counts), len(counts), is_right


def test_parameters_that_travel_through_buffers_do_so_four_segments_at_a_time(pools: Pools) -> None:
    # All at once took buffers as large as all parameters together: half of what sharding Adam saves on many ranks.
    assert pools.run(2, staged_at_a_time) == [(4, 7, True)] * 2


def test_buffers_of_a_strategy_are_small_unless_it_copies_all() -> None:
    module = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])  # 256 MiB
    training = Training(contents_of(module, None), parse_optimizer("adamw"))
    ours, sharded, torchs, fsdp2 = (row(training, 4, name) for name in (DDP, SHARDED, TORCH_DDP, FSDP2))
    assert torchs.communication == training.contents.gradient_bytes
    assert ours.communication < 40 * 2**20
    assert sharded.communication == 5 * ours.communication  # parameters are cut as gradients are
    assert fsdp2.communication == 2 * 2 * (2048 * 2048 + 2048) * 4  # weights and gradients of two layers
    assert all(row(training, 1, name).communication == 0 for name in (DDP, SHARDED, FSDP2))
    assert ours.peak > sharded.peak > fsdp2.peak


# -- activations -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50, bias=False)
        self.out.weight = self.tokens.weight
        self.scale = torch.ones(32)  # an attribute that is no buffer

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) * self.scale
        q, k, v = self.qkv(hidden).view(*tokens.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(hidden.shape)
        found: Tensor = self.out(F.dropout(F.gelu(mixed + hidden), 0.1))
        return found


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(x)[0][:, -1])
        return found


def pictures() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))


def measured_for_real(module: nn.Module, x: Tensor, autocast: torch.dtype | None) -> int:
    """Bytes of the storages that autograd saves on the CPU, and of the output."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    tensors: list[Tensor] = []
    cast: Any = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    hooks = saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda tensor: tensor)
    with hooks, cast:
        tensors.append(module.train()(x))
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(size for address, size in sizes.items() if address not in kept)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("build", "make"),
    [
        (Attention, lambda: torch.zeros(3, 24, dtype=torch.int64)),
        (Checkpointed, lambda: torch.ones(5, 16)),
        (pictures, lambda: torch.ones(2, 3, 8, 8)),
    ],
    ids=["attention", "checkpointed", "pictures"],
)
def test_activations_are_what_autograd_saves(
    build: Callable[[], nn.Module], make: Callable[[], Tensor], autocast: torch.dtype | None
) -> None:
    for device in ("meta", "cpu"):
        with torch.device(device):
            module = build()
        found = run_dry(module, lambda: ((make(),), {}), autocast=autocast, device=DEVICES["cuda"]).activations
        real = measured_for_real(build(), make(), autocast)
        # Fake tensors have the statistics of a BatchNorm in the input's dtype.
        assert found == (real if autocast is None else pytest.approx(real, rel=0.01))


def test_a_batch_that_no_machine_could_hold_is_measured() -> None:
    with torch.device("meta"):
        module = nn.Linear(2**20, 2**20)
    assert run_dry(module, lambda: ((torch.ones(2**20, 2**20),), {})).activations == 2 * 2**42


# -- peaks -------------------------------------------------------------------------------------------------------------


def arrivals_for_real(module: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """Arrivals of a real forward and backward, with tensors that have memory."""
    parameters, found = list(module.train().parameters()), []
    live = LiveBytes([*parameters, *module.buffers()])

    def arrived(place: int, parameter: Tensor) -> None:
        found.append((place, live.peak))
        parameter.grad = None
        live.restart()

    for place, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(partial(arrived, place))
    with live:
        x = x * 1  # allocated inside, as the dry run's input is
        output = module(x)
        logits = output.flatten(0, -2)
        F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64)).backward()
    return found


def dry(module: nn.Module, x: Tensor, kind: str = "cuda") -> DryRun:
    return run_dry(module, lambda: ((torch.ones_like(x),), {}), device=DEVICES[kind])


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (Checkpointed, torch.ones(5, 16)),
        (pictures, torch.ones(2, 3, 8, 8)),
        (Attention, torch.zeros(3, 24, dtype=torch.int64)),
        (lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 9, bias=False)), torch.ones(7, 16)),
    ],
    ids=["checkpointed", "pictures", "attention", "plain"],
)
def test_a_dry_run_has_the_arrivals_and_the_peaks_of_a_real_one(build: Callable[[], nn.Module], x: Tensor) -> None:
    module = build()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert list(dry(build(), x).arrivals) == arrivals_for_real(module, x)


def test_a_shared_parameter_has_one_gradient() -> None:
    # to_empty() gave each of its owners a parameter of its own, so that it had two.
    run = dry(Attention(), torch.zeros(3, 24, dtype=torch.int64))
    assert sorted(place for place, _ in run.arrivals) == list(range(len(list(Attention().parameters()))))


def a_run(*arrivals: tuple[int, int], after: int = 0) -> DryRun:
    return DryRun(0, arrivals, after, 0, "", 1.0, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("run", "buckets", "peak"),
    [
        (a_run((1, 50), (0, 20)), [], 50),
        (a_run((1, 50), (0, 49)), [], 49 + 8),  # the first gradient is still there
        (a_run((1, 5), (0, 5), after=9), [], 9 + 4 + 8),
        (a_run((1, 5), (0, 5), after=9), [[1], [0]], 9),  # copied and freed at once
        (a_run((1, 5), (0, 5), after=9), [[1, 0]], 5 + 8),  # the first one waits for the other
        (a_run((1, 5), (0, 5), after=9), [[0]], 9 + 8),  # one of them is in no bucket
    ],
)
def test_gradients_count_until_their_bucket_is_full(run: DryRun, buckets: list[list[int]], peak: int) -> None:
    assert run.peak([4, 8], buckets) == peak


@pytest.mark.parametrize("text", [*OPTIMIZERS, "adamw+foreach=True", "sgd+foreach=True", "adagrad+foreach=True"])
def test_temporaries_of_a_step_follow_from_tiny_parameters(text: str) -> None:
    trial = parse_optimizer(text)
    shapes = [(300, 40), (300,), (20, 50), (64, 64), (64, 64), (5, 4, 30)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer: Any = trial.optimizer_class(parameters, **trial.options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    with LiveBytes([*parameters, *[each.grad for each in parameters if each.grad is not None], *tensors]) as live:
        optimizer.step()
    found = trial.temporary_bytes((len(shape), prod(shape), torch.float32) for shape in shapes)
    assert found == pytest.approx(live.peak, rel=0.05, abs=1000)


def test_optimizers_on_a_gpu_update_all_parameters_at_once() -> None:
    parts = [(1, 1000, torch.float32)] * 5
    text = "adamw+amsgrad"
    assert parse_optimizer(text, is_foreach=True).temporary_bytes(parts) >= 5 * 4000
    assert parse_optimizer(text).temporary_bytes(parts) == 3 * 4000
    assert parse_optimizer(text + "+fused", is_foreach=True).temporary_bytes(parts) == 0
    assert parse_optimizer(text, is_foreach=True).title == parse_optimizer(text).title


def test_convolutions_have_workspaces_on_a_cpu_alone() -> None:
    def peaks(build: Callable[[], nn.Module], x: Tensor) -> list[int]:
        return [max(peak for _, peak in dry(build(), x, kind).arrivals) for kind in ("cpu", "cuda")]

    def two() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.Conv2d(32, 16, 3, bias=False))

    with_workspace, without = peaks(two, torch.ones(4, 16, 20, 20))
    # Of the first convolution's backward: input, weight and gradient of its output, all in oneDNN's layout.
    assert 0 < with_workspace - without <= 4 * (4 * 16 * 400 + 32 * 16 * 9 + 4 * 32 * 324)
    with_workspace, without = peaks(lambda: nn.Conv2d(3, 16, 3, bias=False), torch.ones(4, 3, 20, 20))
    # It takes a picture of few channels as it is.
    assert with_workspace - without <= 4 * (4 * 16 * 324)


@pytest.mark.parametrize(("width", "hidden"), [(64, 64), (192, 96), (40, 128), (256, 64)])
def test_the_workspace_of_an_lstm_grows_with_its_input_where_that_is_wider(width: int, hidden: int) -> None:
    # Six tensors of the hidden size were counted, and a layer above a bidirectional one has 21: it was 29 % low.
    weights = [torch.ones(4 * hidden, each) for each in (width, hidden)]
    arguments = (torch.ones(32, 24, width), *weights, *[torch.ones(4 * hidden)] * 2, *[torch.ones(24, hidden)] * 2)
    rest: Any = (False, [], 2, hidden, 1, True, False, True, True)
    operator = torch.ops.aten.mkldnn_rnn_layer.default
    result = operator(*arguments, *rest)
    during, kept = DEVICES["cpu"].beside_tensors(operator, (*arguments, *rest), result)
    gates = 4 * result[0].nbytes
    assert during == gates + sum(weight.nbytes for weight in weights)
    assert gates < kept < result[3].nbytes
    assert kept == pytest.approx(0.63 * result[3].nbytes, rel=0.15)
    assert DEVICES["cuda"].beside_tensors(operator, (*arguments, *rest), result) == (0, 0)


def test_a_transposed_convolution_has_its_input_twice_and_its_gradient_too() -> None:
    x, outputs = torch.ones(4, 16, 20, 20), 4 * 4 * 32 * 40 * 40
    run = dry(nn.ConvTranspose2d(16, 32, 2, 2, bias=False), x, "cpu")
    assert run.workspace == 2 * outputs + 4 * x.numel() + 4 * 16 * 32 * 4


def test_kernels_of_convolutions_count_once_for_each_shape_and_dilation() -> None:
    def four() -> nn.Module:
        return nn.Sequential(*[nn.Conv1d(16, 16, 3, padding=2**n, dilation=2**n) for n in (0, 1, 2, 2)])

    run = dry(four(), torch.ones(4, 16, 20), "cpu")
    assert run.convolutions == 3
    footprint = row(Training(contents_of(four(), None), parse_optimizer("sgd"), run=run), 1, DDP)
    cpu = DEVICES["cpu"]
    low, plain = (range_of(footprint, each, cpu, 1)[0] for each in (run, replace(run, convolutions=0)))
    assert low - plain == cpu.convolutions + 3 * cpu.convolution


def test_gaps_are_larger_where_most_blocks_have_one_size() -> None:
    # malloc's memalign() does not take a free block of exactly the size: networks of 1-dimensional convolutions were
    # up to 24 % low.
    def network(*widths: int) -> tuple[nn.Module, DryRun]:
        def build() -> nn.Module:
            return nn.Sequential(*[nn.Conv1d(a, b, 3, padding=1) for a, b in pairwise(widths)])

        return build(), dry(build(), torch.ones(4, widths[0], 4000), "cpu")

    def usual(module: nn.Module, run: DryRun) -> int:
        footprint = row(Training(contents_of(module, None), parse_optimizer("sgd"), run=run), 1, DDP)
        return range_of(footprint, run, DEVICES["cpu"], 1)[1]

    module, run = network(64, 64, 64, 64, 64)
    assert run.equal_share > 0.5
    more = usual(module, run) - usual(module, replace(run, equal_share=0.4))
    assert more == pytest.approx(0.25 * run.peak([0] * 8), rel=0.1)
    module, run = network(64, 40, 24, 16, 8)
    assert run.equal_share < 0.4
    assert usual(module, run) == usual(module, replace(run, equal_share=0.0))


def test_temporaries_of_large_parameters_do_not_stay_in_the_heap() -> None:
    # The heap was taken to keep those of a table of 49 MiB, too, so that two ranks were 27 % high.
    module = nn.Sequential(nn.EmbeddingBag(200_000, 64), nn.Linear(64, 10))
    training = Training(contents_of(module, None), parse_optimizer("adagrad"))
    for footprint in (row(training, 2, strategy) for strategy in (DDP, TORCH_DDP)):
        assert footprint.step > 200_000 * 64 * 4 > 1000 * footprint.step_in_heap


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_usual_peak_is_between_the_lowest_and_the_highest(ranks: int) -> None:
    module = Recurrent()
    run = dry(Recurrent(), torch.ones(5, 7, 16), "cpu")
    training = Training(contents_of(module, None), parse_optimizer("adamw"), run=run)
    for footprint in training.footprints(ranks):
        parts = footprint.weights + footprint.gradients + footprint.state
        for kind in DEVICES.values():
            low, peak, high = range_of(footprint, run, kind, ranks)
            assert parts < low <= peak < high


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
    def make():
        return nn.Embedding(10, 4)

class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

def lazy():
    return nn.Sequential(nn.LazyLinear(4))

def initialized():
    model = lazy()
    model(torch.ones(2, 8))
    return model

def reads():
    return nn.Linear(int(torch.ones(3).sum().item()), 2)

def ends():
    raise SystemExit(3)

class Branches(Small):
    def forward(self, x):
        return self.layers(x) if x.sum() > 0 else x

class NoBackward(Small):
    def forward(self, x):
        return self.layers(x).detach()

class Masks(Small):
    def forward(self, x):
        return self.layers(x[x.sum(1) > 0])

class Keys(Small):
    def forward(self, batch):
        return self.layers(batch["x"])

class Exits(Small):
    def forward(self, x):
        raise SystemExit(3)

class NoOutput(Small):
    def forward(self, x):
        return self.layers(x).argmax(-1)

built = nn.Linear(3, 2, bias=False)
two = lambda: (Small(), 1)
number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, from which commands are run."""
    (tmp_path / "zoo.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


REFUSED = {
    "no ranks": (["zoo.py:Small", "--nproc", "0"], "--nproc=0: give numbers of ranks from 1"),
    "negative ranks": (["zoo.py:Small", "--nproc", "-2"], "--nproc=-2"),
    "no number": (["zoo.py:Small", "--nproc", "two"], "--nproc=two"),
    "too many ranks": (["zoo.py:Small", "--nproc", "1000000"], "from 1 to 4096"),
    "negative batch": (["zoo.py:Small", "--batch-size", "-1", "--input-shape", "16"], "--batch-size=-1 is less than 1"),
    "no length": (["zoo.py:Small", "--batch-size", "2"], "--sequence-length"),
    "both inputs": (["zoo.py:Small", "--sequence-length", "2", "--input-shape", "16"], "give one of them"),
    "wrong shape": (["zoo.py:Small", "--input-shape", "3,x"], "--input-shape 3,x"),
    "wrong width": (["zoo.py:Small", "--input-shape", "17"], "zoo.py:Small failed with a batch of shape (1, 17)"),
    "forward that reads": (["zoo.py:Branches", "--input-shape", "16"], "Branches reads the values of a tensor"),
    "forward that masks": (["zoo.py:Masks", "--input-shape", "16"], "a tensor whose shape depends on values"),
    "other inputs": (["zoo.py:Keys", "--input-shape", "16"], "name a module whose forward makes them of such a tensor"),
    "forward that exits": (["zoo.py:Exits", "--input-shape", "16"], "SystemExit: 3 ("),
    "unknown device": (["zoo.py:Small", "--device", "tpu"], "--device tpu: choose one of cpu, cuda"),
    "no backward": (["zoo.py:NoBackward", "--input-shape", "16"], "its output depends on no parameter"),
    "no output": (["zoo.py:NoOutput", "--input-shape", "16"], "its forward returns no floating-point tensor"),
    "unknown optimizer": (["zoo.py:Small", "--optimizer", "adamx"], "torch has no optimizer 'adamx'"),
    "unknown option": (["zoo.py:Small", "--optimizer", "adamw+momentum"], "AdamW has no option 'momentum'"),
    "wrong option": (["zoo.py:Small", "--optimizer", "sgd+momentum=many"], "'many'"),
    "unfit optimizer": (["zoo.py:Small", "--optimizer", "muon"], "Muon"),
    "unknown dtype": (["zoo.py:Small", "--dtype", "int8"], "--dtype int8: choose one of float32"),
    "no halves": (["zoo.py:Small", "--master-dtype", "float32"], "--master-dtype float32 is for weights in bf16"),
    "autocast alone": (["zoo.py:Small", "--autocast", "bfloat16"], "--autocast changes activations alone"),
    "arguments": (["zoo.py:Net"], "zoo.py:Net takes arguments (missing a required argument: 'width')"),
    "missing file": (["none.py:Small"], "there is no file none.py"),
    "missing module": (["none:Small"], "No module named 'none'"),
    "missing package": (["broken:Small"], "No module named 'no_such_package' ("),
    "missing name": (["zoo:Smal"], "zoo has no 'Smal'"),
    "no function": (["zoo:number"], "zoo:number is of type int; name a function"),
    "no module": (["zoo:two"], "zoo:two returned a value of type tuple"),
    "ends": (["zoo:ends"], "SystemExit: 3"),
    "reads a value": (["zoo:reads"], "zoo:reads failed on the meta device"),
    "lazy": (["zoo:lazy"], "'0.weight' has no shape"),
    "buffers alone": (["zoo:Buffers"], "no parameter that requires a gradient"),
    "file alone": (["zoo.py"], "zoo.py:build"),
    "other folder": (["other"], "the folder other has no config.json"),
    "no name": (["a/b/c"], "'a/b/c' is not a model's name"),
    "too long": (["config.json", "--sequence-length", "65"], "more than the 64 positions of config.json"),
    "no tokens": (["config.json", "--input-shape", "3"], "config.json takes tokens"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("models")
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate-memory", *arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line not in ("imported", "built")]
    assert (out, len(lines)) == ("", 1), err
    assert lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.usefixtures("models")
def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub_models, "find_spec", lambda name: None)
    assert run(monkeypatch, "estimate-memory", "config.json") == 2
    assert (
        f"needs the package 'transformers', which is not installed; {installing('recipes')}" in capsys.readouterr().err
    )


def estimate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert not run(monkeypatch, "estimate-memory", *arguments, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("model", "parameters"),
    [("zoo.py:Small", 676), ("zoo:Small", 676), ("zoo:Factory.make", 40), ("zoo:built", 6), ("zoo:initialized", 36)],
)
def test_models_come_from_classes_functions_and_instances(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, parameters: int
) -> None:
    found = estimate(monkeypatch, capsys, model, "--nproc", "3", "--optimizer", "sgd")
    assert found["parameters"] == parameters
    plain = next(each for each in found["ranks"] if each["strategy"] == DDP)
    assert (plain["nproc"], plain["state"], plain["activations"]) == (3, 0, None)
    assert (plain["weights"], plain["gradients"]) == (4 * parameters, 4 * parameters)


@pytest.mark.usefixtures("models")
def test_totals_are_sums_and_dtypes_are_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--dtype", "bfloat16", "--master-dtype", "float32", "--input-shape", "16", "--batch-size", "8")
    found = estimate(monkeypatch, capsys, "zoo.py:Small", "--nproc", "4,1", *options)
    assert [each["nproc"] for each in found["ranks"]] == [1] * 4 + [4] * 4
    for each in found["ranks"]:
        parts = ("weights", "gradients", "state", "communication", "activations")
        assert each["low"] > sum(each[part] for part in parts[:3])
        assert each["low"] <= each["peak"] < each["high"]
        assert each["activations"] == 2 * 8 * (16 + 32 + 4)  # inputs of both layers, and the output
    plain, sharded, fsdp2 = (
        next(each for each in found["ranks"] if (each["nproc"], each["strategy"]) == (4, name))
        for name in (DDP, SHARDED, FSDP2)
    )
    assert (plain["weights"], plain["state"]) == (2 * 676, 12 * 676 + 4 * 4)
    assert sharded["weights"] == 2 * 676
    assert fsdp2["weights"] == 4 * 676 / 4
    assert plain["state"] / 4 < sharded["state"] < plain["state"] / 2  # 128 elements are not cut


def sample() -> tuple[list[str], list[str]]:
    """The command that the page shows, and the lines that it says are printed."""
    first, *lines = PAGE.read_text("utf-8").partition("    paceline estimate-memory ")[2].splitlines()
    shown = list(takewhile(lambda line: not line or line.startswith("    "), lines))
    return first.split(), [line.removeprefix("    ").rstrip() for line in shown if line.strip()]


@pytest.mark.slow
def test_a_name_on_the_hub_gives_the_table_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOLLM2))
    arguments, shown = sample()
    with Hub({f"models/{arguments[0]}": tmp_path / "model"}) as hub:
        environment = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        done = command(tmp_path, "estimate-memory", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        assert not [request for request in hub.requests if "safetensors" in request]
    assert [line.rstrip() for line in done.stdout.splitlines() if line.strip()] == shown


def test_without_network_one_line_says_what_to_give_instead(tmp_path: Path) -> None:
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = command(tmp_path, "estimate-memory", "org/name", **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "the configuration of org/name is not on this machine" in done.stderr
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "config.json" in done.stderr


def test_help_has_an_example(tmp_path: Path) -> None:
    done = command(tmp_path, "estimate-memory", "--help", COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert "paceline estimate-memory HuggingFaceTB/SmolLM2-360M" in done.stdout
