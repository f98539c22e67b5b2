"""Promise: models from transformers train as in one process, with static_graph, accumulation and checkpointing.

The models are tiny, in float64, with random weights. Sequences have different lengths, so ranks have different numbers
of tokens; the loss is a sum over tokens, weighted by their number. The twin gets all sequences in one batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from drawn import LONG
from paceline import World
from paceline.ddp import DistributedDataParallel, accumulate
from twins import Pools, same_gradients, same_weights

pytestmark = pytest.mark.slow

VOCABULARY, WIDTH, IMAGE = 23, 16, 8
BATCHES = (7, 5, 6, 8, 5)
"""Sequences in the global batch of each step; enough steps for all experts to be used."""
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**TEXT, "num_key_value_heads": 1, "intermediate_size": 20, "use_cache": False, "max_position_embeddings": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2}
T5 |= {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False}
SWITCH = {**T5, "num_experts": 4, "expert_capacity": 64, "router_jitter_noise": 0.0}
SWITCH |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
BERT = {**TEXT, "intermediate_size": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {**BERT, "image_size": IMAGE, "patch_size": 4, "num_channels": 1, "num_labels": VOCABULARY}
EXPERTS_OF_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "eager"}
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "BERT": ("BertConfig", "BertForMaskedLM", {**BERT, "max_position_embeddings": 32}),
    "ViT": ("ViTConfig", "ViTForImageClassification", VIT),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5),
    # All experts of a layer in one parameter: experts without tokens have rows of zeros.
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**DECODER, **EXPERTS_OF_MIXTRAL}),
    # Separate parameters per expert: experts without tokens have no gradient.
    "Switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
}
DENSE, EXPERTS = ["Llama", "BERT", "ViT", "T5"], ["Mixtral", "Switch"]


@dataclass(frozen=True)
class Settings:
    """Settings of a training."""

    static_graph: bool = False
    micros: int = 1
    checkpointing: str = "none"


SETTINGS = [
    Settings(static_graph, micros, checkpointing)
    for at, checkpointing in enumerate(("none", "reentrant", "non-reentrant"))
    for static_graph in (False, True)
    for micros in (1, 2)
    # Every pair of settings; all combinations in long tests.
    if LONG or static_graph == ((micros + at) % 2 == 0)
]


def build(name: str) -> nn.Module:
    import transformers  # only in ranks, because the import takes seconds

    configuration, model, options = CONFIGURATIONS[name]
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, model)(getattr(transformers, configuration)(**options)).double()
    for part in list(module.modules()):
        for child_name, child in list(part.named_children()):
            if hasattr(child, "variance_epsilon"):  # computes in single precision, unlike the twin
                norm = nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64)
                setattr(part, child_name, norm)
        if hasattr(part, "expert_capacity"):
            part.dtype = torch.float64  # Switch's router would convert to single precision in forward
    with torch.no_grad():
        for parameter in module.parameters():  # avoid small values, which make gradients vanish
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.train()


Sample = tuple[Tensor, Tensor]
"""A sequence of tokens or an image, and its targets: one token per position, or a class."""


def samples(name: str, step: int, count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(100 + step)

    def tokens(length: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (length,), generator=generator)

    if name == "ViT":
        images = torch.randn(count, 1, IMAGE, IMAGE, generator=generator, dtype=torch.float64)
        return list(zip(images, tokens(count).split(1), strict=True))
    # Switch routes padding like tokens: an expert with only padding would have zeros instead of no gradient.
    shortest = 8 if name == "Switch" else 2
    lengths = torch.randint(shortest, 9, (count,), generator=generator).tolist()
    return [(tokens(length), tokens(length)) for length in lengths]


def summed_loss(name: str, model: nn.Module, batch: list[Sample]) -> Tensor:
    """Return the loss summed over the tokens of the batch, without padding."""
    if name == "ViT":
        logits = model(pixel_values=torch.stack([x for x, _ in batch])).logits
        return cross_entropy(logits, torch.cat([y for _, y in batch]), reduction="sum")
    ids = nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True, padding_value=0)
    targets = nn.utils.rnn.pad_sequence([y for _, y in batch], batch_first=True, padding_value=-100)
    mask = (ids != 0).long()
    if name in ("T5", "Switch"):
        shifted = nn.functional.pad(ids, (1, -1))  # the decoder's inputs
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=shifted).logits
    else:
        logits = model(input_ids=ids, attention_mask=mask).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def weight_of(batch: list[Sample]) -> int:
    return sum(len(y) for _, y in batch)


def cut(items: list[Any], parts: int) -> list[list[Any]]:
    return [[items[i] for i in part] for part in torch.arange(len(items)).tensor_split(parts)]


def idle_experts_of(module: nn.Module) -> Callable[[], set[str]]:
    """Return a function that returns the experts without tokens on this rank since its last call."""
    used: set[str] = set()
    for name, part in module.named_modules():
        if name.endswith("mlp.gate"):  # Mixtral's router returns the experts of each token

            def routed(_: nn.Module, __: Any, out: Any, name: str = name) -> None:
                used.update(f"{name}.{expert}" for expert in out[-1].flatten().tolist())

            part.register_forward_hook(routed)
        elif ".expert_" in name and name.endswith("wi"):
            part.register_forward_hook(lambda *_, name=name: used.add(name))
    experts = {name for name, _ in module.named_modules() if ".expert_" in name and name.endswith("wi")}
    experts |= {f"{name}.{at}" for name, _ in module.named_modules() if name.endswith("mlp.gate") for at in range(8)}

    def missing() -> set[str]:
        idle = experts - used
        used.clear()
        return idle

    return missing


def train(world: World, name: str, settings: Settings) -> list[set[str]]:
    """Train on this rank and in one process and compare. Return the experts idle on this rank in each step."""
    module = build(name)
    twin = copy.deepcopy(module)
    if settings.checkpointing != "none":
        kind = {"use_reentrant": settings.checkpointing == "reentrant"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deprecated.*")  # the new name does not exist in all versions
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    missing = idle_experts_of(module)
    model = DistributedDataParallel(
        module, static_graph=settings.static_graph, bucket_cap_mb=2e-3, unused_parameters="allow"
    )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9) for net in (module, twin)]
    rtol = 1e-6 if name == "Mixtral" else 1e-9  # its router computes in single precision
    idle = []
    for step, count in enumerate(BATCHES):
        where = f"{name}, {settings}, rank {world.rank} of {world.size}, step {step}:"
        whole = samples(name, step, count)
        mine = [cut(micro, world.size)[world.rank] for micro in cut(whole, settings.micros)]
        for micro in accumulate(model, mine, every=settings.micros):
            if not micro:
                if model.do_sync:
                    model.sync_gradients()
                continue
            with model.weight(weight_of(micro)):
                summed_loss(name, model, micro).backward()
        idle.append(missing())
        (summed_loss(name, twin, whole) / weight_of(whole)).backward()
        same_gradients(module, twin, rtol, where)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_weights(module, twin, rtol, where)
    return idle


def train_all(world: World, name: str, all_settings: list[Settings]) -> list[list[set[str]]]:
    return [train(world, name, settings) for settings in all_settings]


@pytest.mark.parametrize("name", DENSE)
def test_dense_models(pools: Pools, name: str) -> None:
    pools.run(2, train_all, name, SETTINGS if name == "Llama" else SETTINGS[::3])


@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_with_experts_idle_on_some_ranks(pools: Pools, name: str) -> None:
    first, second = pools.run(2, train_all, name, SETTINGS)
    for mine, other in zip(first, second, strict=True):
        assert any(a - b for a, b in zip(mine, other, strict=True)), "no expert was idle on rank 0 and busy on rank 1"
        assert any(b - a for a, b in zip(mine, other, strict=True)), "no expert was idle on rank 1 and busy on rank 0"
