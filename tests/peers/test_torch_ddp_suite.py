"""torch's own tests of DistributedDataParallel pass with our class in the place of torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_suite import SHORTER, ddp_tests, run_test, shortened
from torch_suite_left_out import LEFT_OUT
from twins import Pools

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["paceline", "gloo"])
def worlds(request: pytest.FixtureRequest) -> Iterator[Pools]:
    with Pools(request.param) as pools:
        yield pools


@pytest.mark.parametrize("name", [name for name in ddp_tests() if name not in LEFT_OUT])
def test_passes(worlds: Pools, name: str) -> None:
    assert worlds.run(2, run_test, name) == [None, None]  # not skipped, either


def test_what_is_left_out_exists() -> None:
    assert LEFT_OUT.keys() <= set(ddp_tests())


@pytest.mark.parametrize("name", SHORTER)
def test_what_is_shortened_is_there(name: str) -> None:
    assert shortened(name)
