"""Rank pools for the Checkpointer tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pools


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Pools of ranks of any size, kept alive for all tests in this folder."""
    with Pools() as pools:
        yield pools
