"""Torch's own DistributedDataParallel tests pass with Paceline's class."""

from __future__ import annotations

import pytest

from torch_suite import SHORTER, ddp_tests, run_test, shortened
from torch_suite_left_out import LEFT_OUT
from twins import Pools

pytestmark = pytest.mark.slow


NAMES = [name for name in ddp_tests() if name not in LEFT_OUT]
ON_GLOO = [name for name in NAMES if any(word in name for word in ("uneven", "join", "hook_parity"))]


@pytest.mark.parametrize("name", NAMES)
def test_passes(pools: Pools, name: str) -> None:
    assert pools.run(2, run_test, name) == [None, None]  # None: not skipped


@pytest.mark.parametrize("name", ON_GLOO)
def test_passes_on_gloo(gloo: Pools, name: str) -> None:
    """Covers the tests that depend most on communication."""
    assert gloo.run(2, run_test, name) == [None, None]


def test_excluded_tests_exist() -> None:
    assert LEFT_OUT.keys() <= set(ddp_tests())


@pytest.mark.parametrize("name", SHORTER)
def test_shortened_snippets_exist(name: str) -> None:
    assert shortened(name)
