"""Fixtures of the Trainer tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pools


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """Worlds of every requested size, shared by the tests of this folder."""
    with Pools() as pools:
        yield pools
