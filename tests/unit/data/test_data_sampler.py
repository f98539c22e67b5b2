from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from paceline import World
from paceline.data import GlobalBatchSampler
from paceline.errors import CheckpointMismatch, UsageError


def alone(size: int = 10, batch_size: int = 3, **options: Any) -> GlobalBatchSampler:
    return GlobalBatchSampler(size, batch_size, rank=0, world_size=1, **options)


def foreign(sampler: GlobalBatchSampler, **options: Any) -> TorchLoader:  # type: ignore[type-arg]
    return TorchLoader(torch.arange(sampler.size), batch_sampler=sampler, **options)  # type: ignore[arg-type]


def test_set_epoch_to_the_current_epoch_keeps_the_position_and_another_resets_it() -> None:
    sampler = alone()
    sampler.advance(2)
    sampler.set_epoch(0)
    assert sampler.position == 2
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.position) == (5, 0)


def test_a_finished_epoch_is_followed_by_the_next() -> None:
    sampler = alone()
    sampler.advance(4)
    resumed = alone()
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, resumed.position) == (0, 4)
    other = alone()
    other.set_epoch(1)
    assert list(resumed) == list(other)
    assert resumed.epoch == 2


def test_set_epoch_on_a_finished_epoch_does_not_repeat_it() -> None:
    sampler = alone()
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    counts = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        counts.append(len(list(sampler)))
    assert counts == [0, 4, 4]


def test_torch_dataloader_sees_every_batch_and_the_epoch_advances() -> None:
    sampler = alone()
    loader = foreign(sampler, num_workers=2, persistent_workers=True)
    first = torch.cat(list(loader))
    second = torch.cat(list(loader))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(10))
    assert first.tolist() != second.tolist()
    assert (sampler.epoch, sampler.position) == (2, 0)


def test_consumed_batches_of_torch_dataloader_are_counted_from_the_start_of_the_pass() -> None:
    sampler = alone()
    sampler.set_position(1)
    for consumed, _ in enumerate(foreign(sampler, num_workers=2), 1):
        state = sampler.state_dict(consumed=consumed)
        assert (state["epoch"], state["position"]) == (0, 1 + consumed)


def test_batches_reported_to_advance_count_even_if_workers_prefetched_all() -> None:
    sampler = alone()
    loader = foreign(sampler, num_workers=2, prefetch_factor=4)
    for epoch in range(2):
        for number, _ in enumerate(loader, 1):
            sampler.advance()
            assert (sampler.epoch, sampler.position) == (epoch, number)


def test_the_state_of_an_unreported_pass_is_refused() -> None:
    sampler = alone()
    for _ in foreign(sampler):
        with pytest.raises(UsageError, match=r"reported none as consumed; use paceline.data.DataLoader"):
            sampler.state_dict()
        break
    sampler.set_epoch(1)
    assert sampler.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "batch_size was 3 when the checkpoint was written but is 4 now; use batch_size=3"),
        ({"seed": 9}, "seed was 0 .* but is 9 now; use seed=0"),
        ({"size": 12}, "size was 10 .* but is 12 now; resume with the same 10 samples"),
    ],
)
def test_a_position_for_different_batches_is_refused_with_both_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatch, match=message):
        alone(**change).load_state_dict(alone().state_dict())


def test_a_position_in_a_different_order_is_refused() -> None:
    first = alone(order=list(range(10)))
    first.advance(1)
    saved = first.state_dict()
    alone(order=torch.arange(10)).load_state_dict(saved)
    for other in (alone(order=[0, 1, 2]), alone()):
        with pytest.raises(CheckpointMismatch, match="differs from the checkpoint's"):
            other.load_state_dict(saved)
        assert (other.epoch, other.position) == (0, 0)


def test_order_is_called_once_per_epoch_and_may_change_in_length() -> None:
    asked = []

    def order(epoch: int) -> list[int]:
        asked.append(epoch)
        return [epoch] * (epoch + 1)

    sampler = alone(size=3, batch_size=1, order=order)
    assert [list(sampler) for _ in range(3)] == [[[0]], [[1], [1]], [[2], [2], [2]]]
    assert asked == [0, 1, 2]


class NoLength:
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, not 0"),
        ({"size": 0}, "number of samples must be"),
        ({"size": []}, "list has no samples"),
        ({"size": NoLength()}, "NoLength has no length; use paceline.data.GlobalBatchStream"),
        ({"rank": 3}, "rank 3 is not below world_size 2"),
        ({"size": 2, "drop_last": True}, "drop_last leaves no batch"),
        ({"order": [0, 10]}, "has index 10, but the dataset has 10 samples"),
        ({"order": iter([1])}, "order must be a sequence"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(arguments: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"size": 10, "batch_size": 3, "rank": 0, "world_size": 2, **arguments}
    with pytest.raises(UsageError, match=message):
        GlobalBatchSampler(options.pop("size"), **options)


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=4, but the process group is not initialized"):
        GlobalBatchSampler(10, 3)


@pytest.mark.ranks(2)
def test_rank_and_size_come_from_the_process_group(world: World) -> None:
    assert list(GlobalBatchSampler(5, 5, shuffle=False)) == [[[0, 1, 2]], [[3, 4]]][world.rank]
