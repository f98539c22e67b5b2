"""Second copies of a sharded optimizer's shards: which are there when, and that they bring back the same bits.

Whole runs whose ranks are killed are in test_failover.py. Here each rank is an optimizer of its own in this process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import capture
from paceline.checkpoint.capture import Capture
from paceline.checkpoint.codec import decode
from paceline.checkpoint.own_states import OwnStates
from paceline.checkpoint.registered import Registered
from paceline.checkpoint.shard_copies import ShardCopies, with_shards
from paceline.checkpoint.tensorfile import stored as as_saved
from paceline.checkpoint.turn import Turn
from paceline.errors import CheckpointError, UsageError
from paceline.launch.restarts import Restarts
from paceline.optim import ShardedOptimizer
from paceline.step_records import SHARD, STEPS
from paceline.world import World
from twins import Pools


class Rank:
    """A rank with an optimizer in `folder`, of `size` ranks."""

    def __init__(self, folder: Path, rank: int, size: int = 2, **options: Any) -> None:
        torch.manual_seed(rank)
        self.layer = nn.Linear(3, 2, dtype=options.pop("dtype", torch.float32))
        settings: dict[str, Any] = {"lr": 0.1, "redundancy": 2, **options}
        self.optimizer = ShardedOptimizer(self.layer.parameters(), settings.pop("kind", torch.optim.Adam), **settings)
        self.copies = ShardCopies(folder, rank, size, Registered.of("optimizer", self.optimizer, False, {}))

    def step(self, number: int | None = None) -> None:
        """Take a step, which is stored as `number`."""
        handle = None
        if number is not None:
            handle = self.optimizer.share.register_update_hook(lambda: self.copies.keep_state(number))
        self.layer(torch.ones(4, 3, dtype=self.layer.weight.dtype)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if handle is not None:
            handle.remove()

    def own_states(self) -> OwnStates:
        return OwnStates({}, capture.own([self.copies.settings]), [])


def stored(ranks: list[Rank], step: int) -> list[dict[str, Any]]:
    """Return the shards at `step`, as rank 0 finds them."""
    found = with_shards([ranks[0].copies], step, [rank.own_states() for rank in ranks])
    return [
        decode(each.nodes["optimizer"]["state"], {name: as_saved(tensor) for name, tensor in each.tensors.items()})
        for each in (states.objects for states in found)
    ]


def averages(rank: Rank) -> list[Tensor]:
    return [entry["exp_avg"].clone() for entry in rank.optimizer.local_state()["state"].values()]


def of(shard: dict[str, Any]) -> list[Tensor]:
    return [entry["exp_avg"] for entry in shard["state"].values()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


# -- states --------------------------------------------------------------------------------------------------------


def test_this_step_and_the_one_before_are_there_until_the_next_is_stored(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    expected: dict[int, list[list[Tensor]]] = {}
    for number in (1, 2, 3):
        for rank in ranks:
            rank.step(number)
        expected[number] = [averages(rank) for rank in ranks]
        for step in (number - 1, number):
            if step:
                assert all(
                    equal(of(shard), those) for shard, those in zip(stored(ranks, step), expected[step], strict=True)
                )
    with pytest.raises(CheckpointError, match="rank 0 has not stored its shard of 'optimizer'"):
        stored(ranks, 1)


def test_a_rank_that_did_not_store_its_shard_is_named(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    ranks[0].step(1)
    with pytest.raises(CheckpointError, match="rank 1 has not stored its shard"):
        stored(ranks, 1)


def test_shards_of_different_steps_are_not_put_together(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.step(1)
    ranks[0].step(2)
    with pytest.raises(CheckpointError, match=r"at steps \[2, 1\]"):
        stored(ranks, 2)
    assert len(stored(ranks, 1)) == 2


def test_an_optimizer_that_steps_now_and_then_keeps_its_last_state(tmp_path: Path) -> None:
    """It was once overwritten, as slots went by whether a step is even."""
    rank = Rank(tmp_path, 0, size=1)
    rank.step(2)
    before = averages(rank)
    rank.step(4)
    for step in (2, 3):
        assert equal(of(stored([rank], step)[0]), before)
    assert equal(of(stored([rank], 5)[0]), averages(rank))


def test_what_was_stored_for_a_step_is_replaced_when_it_is_stored_again(tmp_path: Path) -> None:
    """As with two optimizer steps for one step of the Checkpointer."""
    rank = Rank(tmp_path, 0, size=1)
    rank.step(1)
    before = averages(rank)
    rank.step(2)
    rank.step(2)
    assert equal(of(stored([rank], 1)[0]), before)
    assert equal(of(stored([rank], 2)[0]), averages(rank))


def test_a_copy_that_was_cut_off_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.step(1)
    before = averages(rank)

    class Killed(BaseException):
        pass

    def kill(_: str) -> None:
        raise Killed

    monkeypatch.setattr("paceline.checkpoint.slots.strike", kill)
    with pytest.raises(Killed):
        rank.step(2)
    assert equal(of(stored([rank], 2)[0]), before), "the newest whole one"


def changed_by_loading(rank: Rank) -> None:
    state = rank.optimizer.full_state_dict()
    assert state is not None
    for entry in state["state"].values():
        entry["exp_avg"] += 1
    rank.optimizer.load_state_dict(state)


def changed_in_place(rank: Rank) -> None:
    for entry in rank.optimizer.state.values():
        entry["exp_avg"].zero_()


@pytest.mark.parametrize("change", [changed_by_loading, changed_in_place, lambda rank: rank.optimizer.state.clear()])
def test_it_is_noticed_when_someone_else_changes_the_state(tmp_path: Path, change: Any) -> None:
    rank = Rank(tmp_path, 0, size=1)
    assert not rank.copies.is_current
    rank.step(1)
    assert rank.copies.is_current
    change(rank)
    assert not rank.copies.is_current
    rank.copies.keep_state(1)
    assert rank.copies.is_current
    assert equal(of(stored([rank], 1)[0]), averages(rank))


def test_a_group_that_is_added_later_is_in_the_next_copy(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.step(1)
    rank.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))], "lr": 0.5})
    assert not rank.copies.is_current, "the new parameter has no state, but the shard has to say its shape"
    rank.copies.keep_state(1)
    [shard] = stored([rank], 1)
    assert shard["shards"]["shapes"][2] == [7]
    assert [group["lr"] for group in shard["param_groups"]] == [0.1, 0.5]


class Counting(torch.optim.SGD):
    """Keeps a plain number, a list of tensors and a complex tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["parts"] = [torch.full((2,), float(state["count"])), None, "x"]
                state["turned"] = torch.tensor([complex(state["count"], 1)])
        return super().step(closure)


def test_any_state_that_a_checkpoint_holds_is_copied(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1, kind=Counting, by="tensor")
    for number in (1, 2):
        rank.step(number)
    [shard] = stored([rank], 2)
    for entry in shard["state"].values():
        assert entry["count"] == 2
        assert entry["parts"][0].tolist() == [2, 2]
        assert entry["parts"][1:] == [None, "x"]
        assert entry["turned"].tolist() == [2 + 1j]


def test_masters_are_copied_as_they_are_trained(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1, dtype=torch.bfloat16, master_dtype=torch.float32)
    for number in (1, 2):
        rank.step(number)
    [shard] = stored([rank], 2)
    expected = rank.optimizer.local_state()["state"]
    assert all(torch.equal(entry["master"], expected[index]["master"]) for index, entry in shard["state"].items())
    with torch.no_grad():
        rank.layer.weight.add_(1)  # which the next step takes over into other memory
    rank.step(3)
    [shard] = stored([rank], 3)
    expected = rank.optimizer.local_state()["state"]
    assert all(torch.equal(entry["master"], expected[index]["master"]) for index, entry in shard["state"].items())


def test_settings_are_those_that_the_rank_had_at_the_end_of_the_step(tmp_path: Path) -> None:
    """A scheduler steps when the state was stored already."""
    rank = Rank(tmp_path, 0, size=1)
    rank.step(1)
    rank.optimizer.param_groups[0]["lr"] = 0.05
    assert stored([rank], 1)[0]["param_groups"][0]["lr"] == 0.05


def test_the_run_starts_over_when_it_is_restored_at_an_earlier_step(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.step(9)
    rank.step(10)
    rank.copies.start_over()
    rank.step(6)
    before = averages(rank)
    rank.step(7)
    assert equal(of(stored([rank], 6)[0]), before)
    assert equal(of(stored([rank], 7)[0]), averages(rank))


# -- the way back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_parameters_go_back_to_where_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    kind = torch.optim.SGD
    rank = Rank(tmp_path, 0, size=1, dtype=dtype, kind=kind)
    before = [parameter.detach().clone() for parameter in rank.layer.parameters()]
    rank.copies.keep_values(4)
    way_back = rank.copies.way_back(4)
    versions = [parameter._version for parameter in rank.layer.parameters()]
    for parameter in rank.layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    rank.optimizer.step()
    assert not equal([parameter.detach() for parameter in rank.layer.parameters()], before)
    way_back.put_back()
    assert equal([parameter.detach() for parameter in rank.layer.parameters()], before)
    assert list(way_back.versions.values()) == versions


def test_parameters_that_were_given_other_memory_are_stored_from_there(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.step()
    rank.layer.weight.data = torch.full((2, 3), 5.0)
    rank.copies.keep_values(1)
    rank.step()
    rank.copies.way_back(1).put_back()
    assert torch.equal(rank.layer.weight.detach(), torch.full((2, 3), 5.0))


def test_there_is_no_way_back_to_another_step(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.copies.keep_values(4)
    with pytest.raises(CheckpointError, match="rank 0 has not stored its pieces"):
        rank.copies.way_back(5).put_back()
    rank.copies = replace_size(rank.copies, 2)
    with pytest.raises(CheckpointError, match="rank 1 has not stored"):
        rank.copies.way_back(4).put_back()


def replace_size(copies: ShardCopies, size: int) -> ShardCopies:
    return ShardCopies(copies._folder, 0, size, replace(copies.entry))


def test_an_optimizer_that_steps_before_a_sharded_one_is_copied() -> None:
    """The sharded one waits for other ranks, which may have ended, when the first has stepped already."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    turn = Turn()
    for number in range(2):
        sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        way_back = SimpleNamespace(versions={parameters[1]: 7}, put_back=lambda: None)
        turn.step(optimizers[0], optimizers)
        optimizers[0].step()
        turn.step(optimizers[1], optimizers, way_back)
        assert turn.can_go_back == (number > 0), "the first turn shows how the turns are"
        if number == 0:
            turn.end()
    turn.go_back()
    assert torch.equal(parameters[0].detach(), torch.full((3,), 0.8))
    assert turn.version_of(parameters[1]) == 7


# -- memory, and what is refused -------------------------------------------------------------------------------------


def test_copies_of_a_start_that_has_ended_are_removed_by_the_launcher(tmp_path: Path) -> None:
    """They are as large as the optimizer, and a rescued checkpoint is in memory beside them."""
    folder = tmp_path / STEPS / "key"
    folder.mkdir(parents=True)
    (folder / "rank-0").write_text("")
    (folder / f"rank-0.optimizer.state{SHARD}").write_text("")
    restarts = Restarts(tmp_path, None)
    restarts.begin()
    assert [path.name for path in tmp_path.rglob("rank-0*")] == ["rank-0"]


def test_copies_are_removed_when_nobody_needs_them(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, size=1)
    rank.step(1)
    rank.copies.keep_values(1)
    assert len(list(tmp_path.iterdir())) == 2
    rank.copies.remove()
    assert list(tmp_path.iterdir()) == []
    rank.step(2)
    assert equal(of(stored([rank], 2)[0]), averages(rank))


def refusals(world: World) -> list[str]:
    messages = []
    for redundancy in (2, 3, True):
        with pytest.raises(UsageError) as caught:
            ShardedOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1, redundancy=redundancy)
        messages.append(str(caught.value))
    return messages


def test_second_copies_are_refused_where_no_memory_outlives_a_rank(pools: Pools) -> None:
    for without_launcher, *numbers in pools.run(2, refusals):
        assert "takes all ranks of `paceline run` on one host" in without_launcher
        assert all("redundancy is 1, or 2" in message for message in numbers)


def test_one_rank_alone_may_ask_for_second_copies() -> None:
    """So that a script runs without the launcher, too."""
    assert ShardedOptimizer(nn.Linear(3, 2), torch.optim.SGD, lr=0.1, redundancy=2).redundancy == 2


def test_nothing_is_left_of_settings_in_what_is_saved(tmp_path: Path) -> None:
    """A tensor as learning rate is in the stored settings, and again in the shard."""
    rank = Rank(tmp_path, 0, size=1, lr=torch.tensor(0.5), foreach=False)
    rank.step(1)
    other = Capture({"optimizer_of_another": {"state": None}}, {"optimizer_of_another.x": torch.ones(1)}, {})
    own = rank.own_states()
    objects = Capture({**own.objects.nodes, **other.nodes}, {**own.objects.tensors, **other.tensors}, {})
    [found] = with_shards([rank.copies], 1, [replace(own, objects=objects)])
    assert "optimizer_of_another.x" in found.objects.tensors
    groups = decode(found.objects.nodes["optimizer"]["state"], found.objects.tensors)["param_groups"]
    assert float(groups[0]["lr"]) == 0.5
    named = str(found.objects.nodes)
    assert all(name in named or name == "optimizer_of_another.x" for name in found.objects.tensors)
