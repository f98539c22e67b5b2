"""Simulated steps match calculations by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import draws
from insides import Layer, Workload, backward_timeline, equal_layers, simulate


def workload(layers: Sequence[tuple[float, int]], *bucket_bytes: int, micro_batches: int = 1) -> Workload:
    built = [Layer(seconds, nbytes) for seconds, nbytes in layers]
    return Workload(10.0, built, 8, 2.0, 1.0, micro_batches, bucket_bytes or (1,))


@pytest.mark.parametrize(
    ("layers", "buckets", "reduce", "full", "end", "exposed"),
    [
        # Each layer is a bucket, and its all-reduce takes one second per 10 bytes.
        ([(2.0, 10)], (1,), 0.1, [2], [3], 1),
        ([(2.0, 10), (2.0, 10)], (1,), 0.1, [2, 4], [3, 5], 1),
        ([(1.0, 30), (1.0, 10)], (1,), 0.1, [1, 2], [4, 5], 3),
        ([(1.0, 30), (4.0, 10)], (1,), 0.1, [1, 5], [4, 6], 1),
        # Two layers fill a bucket, and the last one is not full.
        ([(1.0, 10), (1.0, 10), (1.0, 10)], (20,), 0.1, [2, 3], [4, 5], 2),
        # The first capacity applies only to the first bucket.
        ([(1.0, 10), (1.0, 10), (1.0, 10)], (10, 20), 0.1, [1, 3], [2, 5], 2),
        # No data to reduce, or reductions that take no time.
        ([(1.0, 0), (2.0, 0)], (100,), 0.1, [3], [3], 0),
        ([(1.0, 10), (2.0, 10)], (1,), 0.0, [1, 3], [1, 3], 0),
    ],
)
def test_buckets_are_reduced_in_order_once_full(
    layers: list[tuple[float, int]],
    buckets: tuple[int, ...],
    reduce: float,
    full: list[float],
    end: list[float],
    exposed: float,
) -> None:
    timeline = backward_timeline(workload(layers, *buckets), lambda nbytes: reduce * nbytes)
    assert timeline.full == pytest.approx(full)
    assert timeline.end == pytest.approx(end)
    assert timeline.exposed == pytest.approx(exposed)


def test_step_is_computation_exposed_communication_and_slowdown() -> None:
    step = simulate(workload([(4.0, 10), (4.0, 10)], 1), lambda nbytes: 0.3 * nbytes, interference=0.5)
    # The first all-reduce, of 3 s, is hidden; the second is exposed. Forward 10, backward 8, other 1, optimizer 2.
    assert (step.compute_s, step.exposed_s, step.hidden_s) == pytest.approx((21, 3, 3))
    assert step.interference_s == pytest.approx(1.5)
    assert step.length_s == pytest.approx(25.5)


def test_accumulation_computes_more_often_and_communicates_once() -> None:
    layers = [(4.0, 10), (4.0, 10)]
    step = simulate(workload(layers, 1, micro_batches=3), lambda nbytes: 0.3 * nbytes)
    assert step.compute_s == pytest.approx(3 * (10 + 8 + 1) + 2)
    assert step.exposed_s == pytest.approx(3)


@draws(100)
@given(st.integers(1, 200), st.floats(1e-6, 10), st.floats(0, 10))
def test_exposed_time_of_equal_layers_matches_the_closed_form(count: int, backward: float, reduce: float) -> None:
    """Either all but the last all-reduce are hidden, or they run back to back from the first layer on."""
    work = workload([(backward, 1)] * count, 1)
    exposed = max(reduce, count * reduce - (count - 1) * backward)
    assert backward_timeline(work, lambda _: reduce).exposed == pytest.approx(exposed, abs=1e-9)


@draws(50)
@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 100)), min_size=1, max_size=50),
    st.integers(1, 1000),
    st.floats(0, 0.1),
    st.floats(0, 1),
)
def test_communication_is_either_exposed_or_hidden(
    layers: list[tuple[float, int]], capacity: int, message: float, byte: float
) -> None:
    work = workload(layers, capacity)

    def reduce_seconds(nbytes: float) -> float:
        return message + byte * nbytes

    timeline, step = backward_timeline(work, reduce_seconds), simulate(work, reduce_seconds)
    assert step.hidden_s <= work.backward_s + 1e-9
    # The last bucket fills at the end of backward.
    assert step.exposed_s >= timeline.end[-1] - timeline.begin[-1] - 1e-9


def test_equal_layers_share_the_time_and_the_bytes() -> None:
    work = equal_layers(36.0, 240, 16)
    assert work.forward_s == pytest.approx(12)
    assert [(layer.backward_s, layer.nbytes) for layer in work.layers] == [(1.0, 10)] * 24
    assert work.compute_s == pytest.approx(36)
