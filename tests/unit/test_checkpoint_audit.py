"""The audit: every tensor of every copy, and each sample once per epoch over restarts and numbers of ranks."""

from __future__ import annotations

import json
import shutil
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_command import Command, command  # noqa: F401
from torch import nn
from torch.utils.data import TensorDataset

from paceline.checkpoint import Checkpointer, consumed_once, sample_ledger
from paceline.checkpoint.sample_ledger import Batches, Run, Source
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel
from paceline.world import World
from twins import Pools

SAMPLES, BATCH = 45, 8


def train(world: World, folder: str, steps: int, resume: bool = False, at: int | None = None) -> list[list[int]]:
    """Train up to `steps`, saving every fourth; return this rank's samples, a list per step that it took."""
    data = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1), torch.arange(SAMPLES))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, seed=3)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    seen = []
    with Checkpointer(folder, keep=99) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, each in {"model": model, "optimizer": optimizer, "loader": loader}.items():
            checkpointer.register(name, each)
        step = checkpointer.restore(at) if resume else 0
        while step < steps:
            for batch in loader:
                if batch is None:
                    model.sync_gradients()
                else:
                    model(batch[0]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                seen.append([] if batch is None else batch[1].tolist())
                if step % 4 == 0:
                    checkpointer.save(step)
                if step >= steps:
                    break
    return seen


def test_samples_are_used_once_over_restarts_and_numbers_of_ranks(
    pools: Pools,
    tmp_path: Path,
    command: Command,  # noqa: F811
) -> None:
    # Steps 9 and 10 were lost with the first run, 13 to 16 because the third goes back; none of them counts twice.
    parts = [
        pools.run(2, train, str(tmp_path / "a"), 10),
        pools.run(1, train, str(tmp_path / "a"), 16, True),
        pools.run(3, train, str(tmp_path / "a"), 20, True, 12),
    ]
    done = command("audit", str(tmp_path / "a"))
    assert done.code == 0, done.out
    assert "each sample used once per epoch" in done.out
    assert "steps 13 to 16 were done again" in done.out
    found = json.loads(command("audit", str(tmp_path / "a"), "--json").out)
    (account,) = found["data"]
    assert [(each["ranks"], each["resumed_at"], each["saved"]) for each in account["runs"]] == [
        (2, None, 8),
        (1, 8, 12),
        (3, 12, 20),
    ]
    assert [(each["epoch"], each["used"], each["samples"]) for each in account["epochs"]] == [
        (0, 6, 45),
        (1, 6, 45),
        (2, 6, 45),
        (3, 2, 16),
    ]
    # And the ledger is right: the steps that led to step 20 had, rank by rank, the samples that it says.
    kept = [[list(chain(*step)) for step in zip(*ranks, strict=True)] for ranks in parts]
    steps = kept[0][:8] + kept[1][:4] + kept[2]
    for epoch in range(3):
        assert sorted(chain(*steps[6 * epoch : 6 * epoch + 6])) == list(range(SAMPLES))


@pytest.fixture
def copies(pools: Pools, tmp_path: Path) -> tuple[Path, Path]:
    pools.run(1, train, str(tmp_path / "a"), 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def test_equal_copies_pass(copies: tuple[Path, Path], command: Command) -> None:  # noqa: F811
    done = command("audit", *map(str, copies))
    assert (done.code, done.err) == (0, "")
    assert "every tensor of every copy equal" in done.out


def test_a_flipped_bit_is_found_in_its_tensor(copies: tuple[Path, Path], command: Command) -> None:  # noqa: F811
    path = copies[1] / "step-00000004" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    done = command("audit", *map(str, copies))
    assert done.code == 1
    assert "does not have the SHA-256" in done.out
    assert "tensor 'weight' of 'model' differs: from byte 3 of 4 on" in done.out
    assert "audit: FAILED" in done.out


def test_runs_that_ended_with_other_bits_differ(pools: Pools, tmp_path: Path, command: Command) -> None:  # noqa: F811
    # Each is whole in itself.
    for fill in (1.0, 2.0):
        with Checkpointer(tmp_path / str(fill)) as checkpointer:
            model = checkpointer.register("model", nn.Linear(2, 1))
            nn.init.constant_(model.weight, 1.0)
            nn.init.constant_(model.bias, fill)
            checkpointer.register("value", Holder({"a": fill}))
            checkpointer.save(1)
    done = command("audit", str(tmp_path / "1.0"), str(tmp_path / "2.0"))
    assert done.code == 1
    assert "tensor 'bias' of 'model' differs" in done.out
    assert "'weight'" not in done.out
    assert "plain values of 'value' differ" in done.out


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_an_undisturbed_run_and_a_resumed_one_are_equal(
    pools: Pools,
    tmp_path: Path,
    command: Command,  # noqa: F811
) -> None:
    pools.run(2, train, str(tmp_path / "whole"), 12)
    pools.run(2, train, str(tmp_path / "cut"), 10)
    pools.run(2, train, str(tmp_path / "cut"), 12, True)
    folders = [str(tmp_path / name / "step-00000012") for name in ("whole", "cut")]
    done = command("audit", *folders)
    assert done.code == 0, done.out


SETTINGS = {"batch_size": 8, "seed": 3, "drop_last": False, "size": 45, "shuffle": True, "order": "of the seed"}


def orders(epoch: int) -> int:
    sampler = GlobalBatchSampler(SAMPLES, BATCH, seed=3, rank=0, world_size=1)
    return sampler._order_fingerprint(epoch)


def runs(*batches: list[tuple[int, int, int]], **changed: Any) -> list[Run]:
    last = {**SETTINGS, **changed}
    found = []
    for number, stretches in enumerate(batches):
        lines: tuple[Batches, ...] = tuple((epoch, begin, end, 6, orders(epoch)) for epoch, begin, end in stretches)
        settings = last if number == len(batches) - 1 else SETTINGS
        found.append(Run(1, None if number == 0 else number, number + 1, None, {"loader": Source(settings, lines)}))
    return found


LEDGERS = {
    "once": (runs([(0, 0, 6), (1, 0, 2)], [(1, 2, 6), (2, 0, 1)]), []),
    "twice": (runs([(0, 0, 6), (1, 0, 3)], [(1, 2, 6)]), ["batches 2 to 2 were used twice"]),
    "missing": (runs([(0, 0, 4), (1, 0, 2)]), ["batches 4 to 5 were not used"]),
    "gap": (runs([(0, 0, 2)], [(0, 3, 6)]), ["batches 2 to 2 were not used"]),
    "a whole epoch twice": (runs([(0, 0, 6)], [(0, 0, 6), (1, 0, 1)]), ["batches 0 to 5 were used twice"]),
    "other seed": (runs([(0, 0, 2)], [(0, 2, 6)], seed=4), ["seed differs between runs"]),
    "not its order": (
        runs([(0, 0, 2)], seed=4),
        ["its order is not the one that its seed decides"],
    ),
}


@pytest.mark.parametrize(("given", "problems"), LEDGERS.values(), ids=LEDGERS)
def test_what_was_not_used_once_is_named(given: list[Run], problems: list[str]) -> None:
    assert [text for epoch in consumed_once.check(given) for text in epoch.problems] == problems
    assert list(sample_ledger.parse(sample_ledger.render(given))) == given


MALFORMED: list[Any] = [
    [],
    {"runs": 1},
    {"runs": [{}]},
    {"runs": [{"ranks": 1, "resumed_at": None, "saved": 1, "done_before": None, "sources": {"a": 1}}]},
]
for line in ("", "0 0 6", "0 6 0 6 1", "0 0 7 6 1", "-1 0 6 6 1", "a b c d e", f"0 0 {2**70} ? ?", 7):
    source = {"settings": {}, "batches": [line]}
    MALFORMED.append(
        {"runs": [{"ranks": 1, "resumed_at": None, "saved": 1, "done_before": None, "sources": {"a": source}}]}
    )


@pytest.mark.parametrize("body", MALFORMED)
def test_a_malformed_ledger_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        sample_ledger.parse(json.dumps(body).encode())


def consumed(batches: int, leave_at: int | None = None) -> list[tuple[int, int, int]]:
    loader = DataLoader(TensorDataset(torch.zeros(20, 1)), batch_size=4, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = 0
    while taken < batches:
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            taken += 1
            if taken in (batches, leave_at):
                break
    return [each[:3] for each in loader.progress.consumed()]


def test_a_pass_that_is_left_goes_on_without_a_gap() -> None:
    assert consumed(12) == [(0, 0, 5), (1, 0, 5), (2, 0, 2)]
    assert consumed(12, leave_at=7) == [(0, 0, 5), (1, 0, 5), (2, 0, 2)]


def test_a_batch_that_was_only_looked_at_is_not_consumed() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(20, 1)), batch_size=4)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    next(iter(loader))
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    assert [each[:3] for each in loader.progress.consumed()] == [(0, 0, 5)]


def test_data_that_is_taken_again_on_purpose_is_there_twice() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(20, 1)), batch_size=4)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loader.progress.set_epoch(0)
        loader.progress.restart()
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
    assert [each[:3] for each in loader.progress.consumed()] == [(0, 0, 5), (0, 0, 5)]


def test_torchs_loader_over_our_sampler_counts_whole_passes() -> None:
    sampler = GlobalBatchSampler(20, 4)
    loader = torch.utils.data.DataLoader(TensorDataset(torch.zeros(20, 1)), batch_sampler=sampler)
    for _ in range(2):
        for _ in loader:
            pass
    assert [each[:3] for each in sampler.consumed()] == [(0, 0, 5), (1, 0, 5)]
