"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twins import Pools


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Worlds of every size asked for, which stay up for a file's tests."""
    with Pools() as pools:
        yield pools
