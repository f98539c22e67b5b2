"""Batches for ranks without samples: supported structures and their cost."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset
from transformers import BatchEncoding

from paceline.data import DataLoader, GlobalBatchSampler


class Fields(NamedTuple):
    x: Any
    names: Any


class Counted(Dataset[Any]):
    """Ten samples that draw random numbers; counts the loads of each."""

    def __init__(self) -> None:
        self.loaded: Counter[int] = Counter()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.loaded[index] += 1
        return index + torch.rand(1, 3)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (torch.stack, "(0, 1, 3)"),
        (torch.cat, "(0, 3)"),
        (lambda samples: torch.stack(samples, 1), "(1, 0, 3)"),
        (lambda samples: [torch.stack(samples)], "[(0, 1, 3)]"),
        (lambda samples: Fields(torch.stack(samples), ["a"] * len(samples)), "Fields(x=(0, 1, 3), names=[])"),
        (lambda samples: {"x": (torch.cat(samples).numpy(), 1.5, None)}, "{'x': ((0, 3), 1.5, None)}"),
        (lambda samples: (torch.cat(samples), len(samples), "a"), "((0, 3), 0, 'a')"),
        (lambda samples: BatchEncoding({"x": torch.cat(samples)}), "{'x': (0, 3)}"),
        (lambda samples: list(samples), "it contains a list, which cannot be emptied"),
        (lambda samples: ({}, len(samples)), "no tensor has one row per sample"),
        (lambda samples: pack_sequence(samples), "it contains a PackedSequence, which cannot be emptied"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_slice_gives_an_empty_batch_or_none_with_one_warning(
    collate: Any, expected: str, workers: int
) -> None:
    def shown(value: Any) -> Any:
        if hasattr(value, "shape"):
            return tuple(value.shape)
        if isinstance(value, Mapping):
            return {key: shown(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            parts = [shown(part) for part in value]
            return Fields(*parts) if isinstance(value, Fields) else tuple(parts) if isinstance(value, tuple) else parts
        return value

    sampler = GlobalBatchSampler(10, 8, rank=2, world_size=4)
    loader = DataLoader(Counted(), batch_sampler=sampler, collate_fn=collate, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (_, warned), (empty, _) = [(shown(batch), len(caught)) for batch in loader]
        list(loader)
    if "tensor" in expected or "cannot" in expected:
        assert empty is None
        [warning] = caught
        assert warned == 1, "with the first batch"
        assert expected in str(warning.message)
        assert "if batch is None:\n        model.sync_gradients()\n" in str(warning.message)
    else:
        assert str(empty) == expected
        assert not caught


def test_the_template_sample_is_loaded_once_without_changing_random_streams() -> None:
    data = Counted()
    sampler = GlobalBatchSampler(data, 8, shuffle=False, rank=2, world_size=4)
    loader, alone = DataLoader(data, batch_sampler=sampler), DataLoader(Counted(), 8)
    before = torch.get_rng_state()
    passes = [list(loader), list(loader)]
    assert torch.equal(before, torch.get_rng_state())
    assert data.loaded == {4: 2, 5: 2, 9: 1}
    for number, (first, last) in enumerate(passes):
        assert last.shape == (0, 1, 3)
        twin = DataLoader(Counted(), batch_sampler=GlobalBatchSampler(10, 8, shuffle=False, rank=2, world_size=4))
        twin.progress.set_epoch(number)
        assert torch.equal(first, next(iter(twin)))
    assert len(alone) == 2
