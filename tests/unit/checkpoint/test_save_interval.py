"""Save intervals of `step()`: automatic ones follow the measured cost of a save and are equal on every rank."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from paceline.checkpoint import Checkpointer, due_saves
from paceline.checkpoint.due_saves import automatic_interval
from paceline.checkpoint.run_folder import RunFolder
from paceline.core import consensus
from paceline.core.world import World
from paceline.errors import UsageError
from twins import Pools


@pytest.mark.parametrize(
    ("save_s", "hosts", "interval_s"),
    [
        (None, 1, 60),  # the first save measures the cost
        (0.01, 1, 674),
        (1.0, 1, 3600),  # 6,743 s without the upper bound
        (100.0, 1, 5000),  # saving hourly would cost 2.8 %
        (1.0, 64, 843),
        (30.0, 2048, 816),
        (0.1, 2048, 60),  # 47 s without the lower bound
    ],
)
def test_automatic_intervals_follow_youngs_formula_within_bounds(
    save_s: float | None, hosts: int, interval_s: float
) -> None:
    assert automatic_interval(save_s, hosts) == pytest.approx(interval_s, rel=1e-3)


STEP_S = 20.0


def trained(world: World, folder: Path) -> tuple[list[int], int]:
    """Train 400 steps on a fake clock; return the saved steps and the number of decisions."""
    now, decisions, decide, save = 0.0, 0, consensus.decide, RunFolder.save

    def counted(*arguments: Any) -> Any:
        nonlocal decisions
        decisions += 1
        return decide(*arguments)

    def timed(*arguments: Any) -> Path:
        nonlocal now
        now += 0.1
        return save(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(due_saves, "time", SimpleNamespace(monotonic=lambda: now))
        patch.setattr(RunFolder, "save", timed)
        checkpointer = Checkpointer(folder, keep=99, every="auto", async_save=True)
        checkpointer.register("model", nn.Linear(2, 2))
        patch.setattr(due_saves, "consensus", SimpleNamespace(decide=counted, here=consensus.here))
        for _ in range(400):
            now += STEP_S * (1 + 4 * world.rank)  # only rank 0's clock matters
            checkpointer.step()
        checkpointer.wait()
        saved = checkpointer.steps()
        checkpointer.close()
    return saved, decisions


def test_the_interval_follows_the_save_cost_and_is_equal_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    interval_s = automatic_interval(0.1, 1)
    (saved, decisions), other = pools.run(2, trained, tmp_path)
    assert other == (saved, decisions)
    first, *_ = saved
    assert first * STEP_S == pytest.approx(60, abs=2 * STEP_S)
    gaps = [STEP_S * (later - earlier) for earlier, later in pairwise(saved)]
    assert len(gaps) == int(8000 / interval_s)
    assert all(interval_s <= gap < interval_s + 2 * STEP_S for gap in gaps)
    assert decisions < 120  # most of the 400 steps need no collective


@pytest.mark.parametrize("every", ["hourly", 0, True, 1.5])
def test_an_unknown_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(UsageError, match="must be a positive number of steps, a positive timedelta or 'auto'"):
        Checkpointer(tmp_path, every=every)
