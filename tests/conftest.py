"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

# The tests are of CPU ranks, of which there are more than GPUs; scripts/gpu_check.py checks these.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import settings

from twins import Pools

# How long an example takes depends on how busy the machine is, which no test may.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Worlds of every size asked for, which stay up for a file's tests."""
    with Pools() as pools:
        yield pools
