"""Promise: typical scripts end with the same bits as with torch DDP after changing only the import.

Scripts modeled after ImageNet, nanoGPT and DCGAN run twice on the same ranks, with each wrapper. Every rank evaluates
with the buffers of rank 0, and rank 0 may evaluate alone, which hangs with torch's wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline import World
from paceline.ddp import DistributedDataParallel

TorchDDP = nn.parallel.DistributedDataParallel
Script = Callable[[type[TorchDDP], World], tuple[list[nn.Module], list[float]]]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- vision: BatchNorm, torch's DistributedSampler, an evaluation after each epoch -------------------------------------


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    block = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    head = [nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*block, *head, nn.Linear(16, 5))


def validate(model: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """Return loss and accuracy over all images, computed locally."""
    model.eval()
    with torch.no_grad():
        scores = model(images)
    model.train()
    return [F.cross_entropy(scores, labels).item(), (scores.argmax(1) == labels).float().mean().item()]


def vision(wrapper: type[TorchDDP], world: World) -> tuple[list[nn.Module], list[float]]:
    images, labels = random(60, 3, 8, 8, seed=1), torch.arange(60) % 5
    held_out = random(20, 3, 8, 8, seed=2), torch.arange(20) % 5
    model = wrapper(convolutional())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = TensorDataset(images, labels)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, 7, sampler=sampler)
    evaluations = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        # Torch's wrapper would broadcast buffers here, so a single rank would hang.
        evaluated = model if wrapper is DistributedDataParallel else model.module
        alone = validate(evaluated, *held_out) if world.rank == 0 else []
        together = validate(model, *held_out)
        assert not alone or alone == together
        evaluations += together
    return [model], evaluations


# -- GPT: gradient accumulation by require_backward_grad_sync, tied weights, groups of AdamW, clipping -----------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, tokens: int = 32, width: int = 16, length: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, tokens, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        scores = self.head(self.blocks(x))
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def gpt(wrapper: type[TorchDDP], world: World) -> tuple[list[nn.Module], list[float]]:
    model = wrapper(GPT())
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(32, (3, 13), generator=torch.Generator().manual_seed(seed))
        return text[:, :-1], text[:, 1:]

    evaluations = []
    for step in range(4):
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2  # as in nanoGPT, without a context manager
            _, loss = model(*batch(100 * step + 10 * micro + world.rank))
            (loss / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 2:
            model.eval()
            with torch.no_grad():
                evaluations.append(model(*batch(7))[1].item())
            model.train()
    return [model], evaluations


# -- GAN: two wrappers, the discriminator backward twice a step, BatchNorm in both -------------------------------------


def gan(wrapper: type[TorchDDP], world: World) -> tuple[list[nn.Module], list[float]]:
    torch.manual_seed(0)
    maker: list[nn.Module] = [nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)]
    generator = wrapper(nn.Sequential(*maker, nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh()))
    judge: list[nn.Module] = [nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, True)]
    discriminator = wrapper(nn.Sequential(*judge, nn.Conv2d(8, 1, 4, bias=False), nn.Flatten(0)))
    optimizers = [torch.optim.Adam(model.parameters(), 0.002, (0.5, 0.999)) for model in (generator, discriminator)]
    fixed, evaluations = random(4, 6, 1, 1, seed=5), []
    for step in range(4):
        seed = 100 * step + 2 * world.rank
        optimizers[1].zero_grad()
        score = discriminator(random(5, 1, 8, 8, seed=seed))
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        fake = generator(random(5, 6, 1, 1, seed=seed + 1))
        score = discriminator(fake.detach())
        F.binary_cross_entropy_with_logits(score, torch.zeros_like(score)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        score = discriminator(fake)  # gradients of the discriminator are averaged and discarded
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        optimizers[0].step()
        generator.eval(), discriminator.eval()
        with torch.no_grad():
            evaluations.append(discriminator(generator(fixed)).sum().item())
        generator.train(), discriminator.train()
    return [generator, discriminator], evaluations


# -- the same script with either wrapper -------------------------------------------------------------------------------


def compare_with_torch(world: World, script: Script) -> list[float]:
    theirs, evaluated_by_torch = script(TorchDDP, world)
    ours, evaluations = script(DistributedDataParallel, world)
    for mine, other in zip(ours, theirs, strict=True):
        for (name, parameter), twin in zip(mine.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter, twin), f"{name} differs by {(parameter - twin).abs().max()}"
        # Torch's buffers are local between steps.
        if world.rank == 0:
            for (name, buffer), twin in zip(mine.named_buffers(), other.buffers(), strict=True):
                assert torch.equal(buffer, twin), name
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, mine.state_dict())
        for values in everyone:
            assert all(torch.equal(value, everyone[0][name]) for name, value in values.items())
    if world.rank == 0:
        assert evaluations == evaluated_by_torch
    return evaluations


@pytest.mark.parametrize(
    ("backend", "script", "size"),
    # With more than 2 ranks, Gloo's summation order depends on the position in the bucket.
    [
        ("pools", vision, 2),
        ("pools", gpt, 2),
        ("pools", gan, 4),
        *(("gloo", script, 2) for script in (vision, gpt, gan)),
    ],
)
def test_weights_equal_torch_ddp_and_every_rank_evaluates_like_rank_0(
    request: pytest.FixtureRequest, backend: str, script: Script, size: int
) -> None:
    first, *others = request.getfixturevalue(backend).run(size, compare_with_torch, script)
    assert len(set(first)) > 1  # the model changes
    assert all(other == first for other in others)
