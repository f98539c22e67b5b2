"""The tests of with_spawn.py on ranks that are forked; the workers stay as they are, with setup() and cleanup()."""

import pytest
from with_spawn import worker_like_one_process, worker_weights_equal


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_equal_at_the_start(world, overlap):
    worker_weights_equal(world.rank, world.size, overlap)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_training_is_that_of_one_process(world, overlap, tied):
    worker_like_one_process(world.rank, world.size, overlap, tied)
