"""Ranks of the Checkpointer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pools


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Worlds of every size asked for, which stay up for the folder's tests."""
    with Pools() as pools:
        yield pools
