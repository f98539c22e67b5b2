"""Schedules of collective algorithms: the messages of each step, and whether the receiver adds them.

Each algorithm is a pure function that returns a :class:`Schedule`. The same value is executed
(:mod:`paceline.comm.algorithms`), costed (:class:`Model`), drawn (``paceline explain``) and tested. In the docstrings,
p is the number of ranks, and n the number of bytes of a tensor.

A schedule follows these rules:

- A tensor of n elements is cut into ``chunks`` parts; part c is ``bounds(n, chunks, c)``. Parts differ by at most one
  element, and some are empty if n is smaller.
- Steps run one after another. Within a step every transfer reads the content that its source had *before* the step, so
  all transfers may run at once. A step is not a barrier: a rank without a transfer in it continues.
- ``reduce=True``: the receiver combines its own chunks with the message. ``reduce=False``: the message replaces them.
- In one step a rank sends at most one message and receives at most one, and it never receives a chunk that it also
  sends. So a message may be written as soon as it arrives, and the operands of a sum have a fixed order: held first,
  received second.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

from paceline.core.missing_ranks import ranks_by_value
from paceline.errors import UsageError

Result = Literal["all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather", "all-to-all"]


@dataclass(frozen=True)
class Transfer:
    """One message."""

    src: int
    dst: int
    chunks: range
    """Adjacent chunks that are sent as one message."""
    reduce: bool
    """Whether the receiver combines them with its own chunks; otherwise they replace its chunks."""


Step = tuple[Transfer, ...]
"""Messages that are sent at the same time."""


@dataclass(frozen=True)
class Schedule:
    """An algorithm for a given number of ranks."""

    name: str
    """Name of the public function, such as ``"ring_all_reduce"``."""
    result: Result
    """Collective that the algorithm implements."""
    size: int
    """Number of ranks, numbered from 0 as in the group."""
    chunks: int
    """Number of parts into which the tensor is cut."""
    steps: tuple[Step, ...]
    root: int | None = None
    """Source of a broadcast or destination of a reduction; None if all ranks have the same role."""

    def of(self, rank: int) -> Iterator[tuple[list[Transfer], list[Transfer]]]:
        """Yield the messages that `rank` sends and receives, for each step that has any."""
        for step in self.steps:
            sent = [transfer for transfer in step if transfer.src == rank]
            received = [transfer for transfer in step if transfer.dst == rank]
            if sent or received:
                yield sent, received


def bounds(count: int, chunks: int, first: int, last: int | None = None) -> slice:
    """Return the range of the `count` elements in chunk `first`, or in chunks `first` up to but excluding `last`."""
    last = first + 1 if last is None else last
    return slice(count * first // chunks, count * last // chunks)


def elements(schedule: Schedule, transfer: Transfer, count: int) -> int:
    """Return how many of a tensor's `count` elements a transfer carries."""
    part = bounds(count, schedule.chunks, transfer.chunks.start, transfer.chunks.stop)
    return int(part.stop - part.start)


Terms = tuple[int, ...]
"""Ranks whose contributions are combined in a chunk, in ascending order; a rank counted twice appears twice."""


def holdings(schedule: Schedule) -> list[list[list[Terms]]]:
    """Return the content of every chunk: ``holdings(s)[k][rank][chunk]`` after k steps, starting with each rank's own.

    After an all-reduce every entry is ``(0, 1, …, size - 1)``, after a broadcast ``(root,)``.
    """
    current: list[list[Terms]] = [[(rank,)] * schedule.chunks for rank in range(schedule.size)]
    history = [current]
    for step in schedule.steps:
        following = [list(chunks) for chunks in current]
        for transfer in step:
            for chunk in transfer.chunks:
                arriving = current[transfer.src][chunk]
                held = current[transfer.dst][chunk]
                following[transfer.dst][chunk] = tuple(sorted(held + arriving)) if transfer.reduce else arriving
        current = following
        history.append(current)
    return history


def together(*phases: Sequence[Step]) -> list[Step]:
    """Merge phases that run at the same time. A rank must not be in more than one of them."""
    return [sum(steps, ()) for steps in zip_longest(*phases, fillvalue=())]


def backwards(steps: Iterable[Step]) -> list[Step]:
    """Turn a reduction into a broadcast: run its messages in reverse order and direction, copying instead of adding."""
    return [
        tuple(Transfer(sent.dst, sent.src, sent.chunks, reduce=False) for sent in step)
        for step in reversed(list(steps))
    ]


class Model(NamedTuple):
    """The alpha-beta-gamma model of an algorithm's cost.

    A message costs alpha seconds, plus beta for each byte; reducing a byte costs gamma. Hockney, "The communication
    challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (1994); with gamma as in Thakur,
    Rabenseifner & Gropp, IJHPCA 19 (2005). A rank sends and receives at the same time, one message each way. So a step
    takes ::

        alpha  +  beta · the most bytes that a rank sends or receives  +  gamma · the most bytes that a rank reduces

    and an algorithm takes the sum of its steps. With L = ⌈log₂ p⌉ (tested equal to the schedules)::

        linear broadcast, reduce           (p−1) α  +  (p−1) n β          [+ (p−1) n γ]
        tree broadcast, reduce             L α      +  L n β              [+ L n γ]
        scatter, all-gather (p = 2^L)      (L+p−1) α + 2 (p−1)/p n β
        ring reduce-scatter, all-gather    (p−1) α  +  (p−1)/p n β        [+ (p−1)/p n γ]
        ring all-reduce                    2(p−1) α +  2 (p−1)/p n β       + (p−1)/p n γ
        tree all-reduce                    2 L α    +  2 L n β             + L n γ
        halving-doubling (p = 2^L)         2 L α    +  2 (p−1)/p n β       + (p−1)/p n γ
        hierarchical, h hosts of m         2(m+h−2) α + 2 (p−1)/p n β      + (p−1)/p n γ
    """

    alpha: float
    """Seconds for a message."""
    beta: float
    """Seconds for a byte that is sent."""
    gamma: float = 0.0
    """Seconds for a byte that is reduced."""

    def seconds(self, schedule: Schedule, nbytes: float) -> float:
        """Return the seconds that `schedule` takes for a tensor of `nbytes`."""
        messages, moved, reduced = features(schedule, nbytes)
        return self.alpha * messages + self.beta * moved + self.gamma * reduced


Features = tuple[float, float, float]
"""Factors of alpha, beta and gamma."""


def features(schedule: Schedule, nbytes: float) -> Features:
    """Count the consecutive messages, the bytes moved and the bytes reduced, for a tensor of `nbytes`."""
    counts = [_count(step, nbytes / schedule.chunks) for step in schedule.steps]
    messages, moved, reduced = (sum(column) for column in zip(*counts, strict=True)) if counts else (0.0, 0.0, 0.0)
    return messages, moved, reduced


def _count(step: Step, per_chunk: float) -> Features:
    """Count the factors of one step: the busiest rank's work."""
    if not step:
        return 0.0, 0.0, 0.0
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    reduced: dict[int, float] = {}
    for transfer in step:
        size = per_chunk * len(transfer.chunks)
        sent[transfer.src] = sent.get(transfer.src, 0.0) + size
        received[transfer.dst] = received.get(transfer.dst, 0.0) + size
        if transfer.reduce:
            reduced[transfer.dst] = reduced.get(transfer.dst, 0.0) + size
    return 1.0, max(*sent.values(), *received.values()), max(reduced.values(), default=0.0)


_WHOLE = range(1)


def linear_broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast: the root serves the other ranks one by one, in p−1 steps of n bytes.

    The baseline for the other broadcasts, which are not faster with two ranks. From rank 1 of 4::

        step 1    1 → 2
        step 2    1 → 3
        step 3    1 → 0
    """
    steps = tuple((Transfer(root, (root + place) % size, _WHOLE, reduce=False),) for place in range(1, size))
    return Schedule("linear_broadcast", "broadcast", size, 1, steps, root)


def linear_reduce(size: int, root: int = 0) -> Schedule:
    """Build the reduction: the root receives (p−1) · n bytes, added in rank order from the next rank.

    To rank 1 of 4; ``→`` adds::

        step 1    2 → 1
        step 2    3 → 1
        step 3    0 → 1
    """
    steps = tuple((Transfer((root + place) % size, root, _WHOLE, reduce=True),) for place in range(1, size))
    return Schedule("linear_reduce", "reduce", size, 1, steps, root)


def pairwise_all_to_all(size: int) -> Schedule:
    """Build the pairwise exchange: in step k, rank r and rank r xor k swap the parts meant for each other.

    Chunk s·p + d is rank s's part for rank d, so all chunks together are p tensors of n bytes. If p is a power of two:
    p−1 steps, (p−1)/p · n bytes from every rank. There is no public function for it, only this schedule.
    """
    steps = (
        tuple(
            Transfer(rank, rank ^ step, range(chunk := rank * size + (rank ^ step), chunk + 1), reduce=False)
            for rank in range(size)
            if rank ^ step < size
        )
        for step in range(1, 1 << (size - 1).bit_length())
    )
    return Schedule("pairwise_all_to_all", "all-to-all", size, size * size, tuple(steps))


def tree_reduce_steps(size: int, root: int = 0) -> list[Step]:
    """Build the binomial tree toward `root`; the rank v places after it sends in the step of v's lowest set bit.

    In every step the number of ranks that have finished doubles, so ⌈log₂ p⌉ steps suffice. No algorithm has fewer
    steps, because a rank can reach only one other rank per step. The tree pays off for short messages, because every
    step sends the whole message; see Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations
    in MPICH", IJHPCA 19 (2005).

    Reduction to rank 0 of 6 ranks; ``→`` adds ::

        step 1    1 → 0    3 → 2    5 → 4
        step 2    2 → 0
        step 3    4 → 0

    Another root takes the place of rank 0, followed by the ranks after it in order. The whole tensor is one chunk.
    """
    steps = []
    distance = 1
    while distance < size:
        senders = range(distance, size, 2 * distance)
        steps.append(
            tuple(
                Transfer((root + place) % size, (root + place - distance) % size, _WHOLE, reduce=True)
                for place in senders
            )
        )
        distance *= 2
    return steps


def tree_reduce(size: int, root: int = 0) -> Schedule:
    """Build the reduction: ⌈log₂ p⌉ steps; every rank but the root sends n bytes, the root receives ⌈log₂ p⌉ · n."""
    return Schedule("tree_reduce", "reduce", size, 1, tuple(tree_reduce_steps(size, root)), root)


def tree_broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast: ⌈log₂ p⌉ steps; every rank but the root receives n bytes, the root sends ⌈log₂ p⌉ · n.

    From rank 0 of 6: ``0 → 4``, then ``0 → 2``, then ``0 → 1, 2 → 3, 4 → 5``.
    """
    return Schedule("tree_broadcast", "broadcast", size, 1, tuple(backwards(tree_reduce_steps(size, root))), root)


def tree_all_reduce(size: int) -> Schedule:
    """Build the all-reduce: reduction to rank 0, then broadcast from it. 2 ⌈log₂ p⌉ steps of n bytes."""
    steps = tree_reduce_steps(size)
    return Schedule("tree_all_reduce", "all-reduce", size, 1, tuple(steps + backwards(steps)))


def reduce_scatter_steps(members: Sequence[int], blocks: Sequence[range]) -> list[Step]:
    """Build a ring's reduce-scatter among `members`; the i-th member ends with the sum of ``blocks[i]``.

    In every step each rank sends only to the next one, so all links are always busy. Three ranks, chunks A B C; the
    columns show the chunks of each rank (a: its own, A₁₂: a partial sum)::

                  rank 0        rank 1        rank 2
        start     a  b  c       a  b  c       a  b  c
        step 1    rank 0 sends C to 1,  1 sends A to 2,  2 sends B to 0;  each adds
                  a  B₂₀ c      a  b  C₀₁     A₁₂ b  c
        step 2    rank 0 sends B to 1,  1 sends C to 2,  2 sends A to 0;  each adds
                  A  .  .       .  B  .       .  .  C         rank r has the whole sum of chunk r
    """
    size = len(members)
    return [
        tuple(
            Transfer(members[place], members[(place + 1) % size], blocks[(place - 1 - step) % size], reduce=True)
            for place in range(size)
        )
        for step in range(size - 1)
    ]


def all_gather_steps(members: Sequence[int], blocks: Sequence[range]) -> list[Step]:
    """Build a ring's all-gather among `members`; the i-th member begins with ``blocks[i]``.

    After the reduce-scatter above, the sums go around the ring in the same direction and are copied::

        step 3    A  .  C       A  B  .       .  B  C
        step 4    A  B  C       A  B  C       A  B  C
    """
    size = len(members)
    return [
        tuple(
            Transfer(members[place], members[(place + 1) % size], blocks[(place - step) % size], reduce=False)
            for place in range(size)
        )
        for step in range(size - 1)
    ]


def ring_reduce_scatter(size: int) -> Schedule:
    """Build the reduce-scatter: rank r ends with the sum of chunk r. p−1 steps, (p−1)/p · n bytes from every rank."""
    steps = reduce_scatter_steps(range(size), _one_each(size))
    return Schedule("ring_reduce_scatter", "reduce-scatter", size, size, tuple(steps))


def ring_all_gather(size: int) -> Schedule:
    """Build the all-gather: rank r's chunk r goes to all ranks. p−1 steps, (p−1)/p · n bytes sent by every rank."""
    steps = all_gather_steps(range(size), _one_each(size))
    return Schedule("ring_all_gather", "all-gather", size, size, tuple(steps))


def ring_all_reduce(size: int) -> Schedule:
    """Build the all-reduce: reduce-scatter, then all-gather. 2 (p−1) steps, 2 (p−1)/p · n bytes sent by every rank.

    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009). In any
    all-reduce each rank sends at least 2 (p−1)/p · n bytes, and in the ring it sends no more. The price is the number
    of steps. Every chunk is summed along one path and then copied, so the results on all ranks are bit-identical.
    """
    blocks = _one_each(size)
    steps = reduce_scatter_steps(range(size), blocks) + all_gather_steps(range(size), blocks)
    return Schedule("ring_all_reduce", "all-reduce", size, size, tuple(steps))


def _one_each(size: int) -> list[range]:
    return [range(chunk, chunk + 1) for chunk in range(size)]


def halving_doubling_all_reduce(size: int) -> Schedule:
    """Build the all-reduce: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner & Gropp, IJHPCA 19
    (2005). If p is a power of two, every rank sends as few bytes as in the ring, 2 (p−1)/p · n, in only 2 log₂ p steps.

    Four ranks, chunks A B C D. Partners exchange halves of the chunks that they still reduce, and add::

        halving     step 1    0 ↔ 2, 1 ↔ 3    0 and 1 keep A B,  2 and 3 keep C D
                    step 2    0 ↔ 1, 2 ↔ 3    0 keeps A,  1 keeps B,  2 keeps C,  3 keeps D:  each a whole sum
        doubling    step 3    0 ↔ 1, 2 ↔ 3    0 and 1 have A B,  2 and 3 have C D
                    step 4    0 ↔ 2, 1 ↔ 3    all have A B C D

    For other p, the ranks beyond the largest power of two q are folded in, which takes two steps and 2 n bytes more:
    rank q+i first sends everything to rank i, which adds it, and at the end receives the result from it. Each chunk's
    sum is completed on one rank and copied from there, so the results on all ranks are bit-identical.
    """
    core = 1 << (size.bit_length() - 1)
    extra: Step = tuple(Transfer(core + rank, rank, range(core), reduce=True) for rank in range(size - core))
    steps = ([extra] if extra else []) + halving_steps(core)
    return Schedule("halving_doubling_all_reduce", "all-reduce", size, core, tuple(steps + backwards(steps)))


def halving_steps(size: int) -> list[Step]:
    """Build the halving among `size` ranks, a power of two: rank r ends with the sum of chunk r."""
    steps: list[Step] = []
    distance = size // 2
    while distance > 0:
        # A rank still holds the sums of 2·distance chunks. Its partner's half begins at the partner's number, rounded
        # down to a multiple of distance.
        steps.append(
            tuple(
                Transfer(rank, rank ^ distance, _half_of(rank ^ distance, distance), reduce=True)
                for rank in range(size)
            )
        )
        distance //= 2
    return steps


def _half_of(rank: int, distance: int) -> range:
    first = rank // distance * distance
    return range(first, first + distance)


def hierarchical_all_reduce(hosts: Sequence[Hashable]) -> Schedule:
    """Build the all-reduce within hosts, across hosts, and within hosts: each byte crosses the network once per host.

    Cho, Finkler, Kung & Hunter, "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
    hierarchy", SysML 2019. With h hosts of m ranks, it takes 2 (m−1) + 2 (h−1) steps. Every rank sends 2 (p−1)/p · n
    bytes, of which 2 (h−1)/h · n/m go over the network; a flat ring sends 2 (p−1)/p · n over each link between hosts::

        host x: ranks 0 1     host y: ranks 2 3     chunks A B | C D:  place 0 of a host reduces A B, place 1 C D

        inside     step 1    0 ↔ 1, 2 ↔ 3     a ring's reduce-scatter: 0 and 2 have their host's A B, 1 and 3 its C D
        across     step 2    0 ↔ 2, 1 ↔ 3     a ring's reduce-scatter: 0 has A, 2 has B, 1 has C, 3 has D
                   step 3    0 ↔ 2, 1 ↔ 3     a ring's all-gather: 0 and 2 have A B, 1 and 3 have C D
        inside     step 4    0 ↔ 1, 2 ↔ 3     a ring's all-gather: all have A B C D

    If hosts have different numbers of ranks, m is the smallest. Each additional rank of a host first sends everything
    to one of the m ranks, and receives the result from it at the end.
    """
    rows = list(ranks_by_value(enumerate(hosts)).values())  # the ranks of each host
    places, size = min(map(len, rows)), len(hosts)
    parts = len(rows)
    chunks = places * parts
    shards = [range(place * parts, (place + 1) * parts) for place in range(places)]
    cores = [row[:places] for row in rows]

    folded = _fold(rows, places, chunks)
    inside = together(*(reduce_scatter_steps(row, shards) for row in cores))
    columns = [[row[place] for row in cores] for place in range(places)]
    pieces = [[range(chunk, chunk + 1) for chunk in shard] for shard in shards]
    across = together(*(reduce_scatter_steps(*pair) for pair in zip(columns, pieces, strict=True)))
    back = together(*(all_gather_steps(*pair) for pair in zip(columns, pieces, strict=True)))
    outside = together(*(all_gather_steps(row, shards) for row in cores))
    steps = [*folded, *inside, *across, *back, *outside, *backwards(folded)]
    return Schedule("hierarchical_all_reduce", "all-reduce", size, chunks, tuple(steps))


def _fold(rows: Sequence[Sequence[int]], places: int, chunks: int) -> list[Step]:
    """Build the rounds in which each host's other ranks send messages to its first `places` ranks."""
    rounds: list[Step] = []
    # A rank receives at most one message per step, so several rounds may be needed.
    for start in range(places, max(map(len, rows)), places):
        rounds.append(
            tuple(
                Transfer(rank, row[place], range(chunks), reduce=True)
                for row in rows
                for place, rank in enumerate(row[start : start + places])
            )
        )
    return rounds


def scatter_all_gather_broadcast(size: int, root: int = 0) -> Schedule:
    """Build the broadcast of a long message: scatter its chunks down a tree, then pass them around a ring.

    Van de Geijn's algorithm: Barnett, Shuler, Gupta, Payne, van de Geijn & Watts, "Building a high-performance
    collective communication library", Supercomputing '94. The tree alone sends the whole message ⌈log₂ p⌉ times through
    one rank. Here every rank receives at most 2 (p−1)/p · n bytes, at the price of p−1 more steps: ⌈log₂ p⌉ + p−1.

    Four ranks, root 0, chunks A B C D::

        scatter       step 1    0 → 2  C D
                      step 2    0 → 1  B        2 → 3  D           rank r has chunk r (the root: all)
        all-gather    step 3    0 → 1  A    1 → 2  B    2 → 3  C    3 → 0  D
                      step 4    0 → 1  D    1 → 2  A    2 → 3  B    3 → 0  C
                      step 5    0 → 1  C    1 → 2  D    2 → 3  A    3 → 0  B

    With another root, chunks are numbered starting from the root: the rank v places after it gets chunk v.
    """
    members = [(root + place) % size for place in range(size)]
    steps = scatter_steps(size, root) + all_gather_steps(members, [range(chunk, chunk + 1) for chunk in range(size)])
    return Schedule("scatter_all_gather_broadcast", "broadcast", size, size, tuple(steps), root)


def scatter_steps(size: int, root: int) -> list[Step]:
    """Build the steps down the binomial tree: a rank forwards the chunks of the receiver's whole subtree."""
    distance = 1
    while distance < size:
        distance *= 2
    steps: list[Step] = []
    while (distance := distance // 2) > 0:
        steps.append(
            tuple(
                Transfer(
                    (root + place - distance) % size,
                    (root + place) % size,
                    range(place, min(place + distance, size)),
                    reduce=False,
                )
                for place in range(distance, size, 2 * distance)
            )
        )
    return steps


_ROOTED: dict[str, Callable[[int, int], Schedule]] = {
    "linear_broadcast": linear_broadcast,
    "tree_broadcast": tree_broadcast,
    "scatter_all_gather_broadcast": scatter_all_gather_broadcast,
    "linear_reduce": linear_reduce,
    "tree_reduce": tree_reduce,
}
_ROOTLESS: dict[str, Callable[[int], Schedule]] = {
    "ring_reduce_scatter": ring_reduce_scatter,
    "ring_all_gather": ring_all_gather,
    "ring_all_reduce": ring_all_reduce,
    "tree_all_reduce": tree_all_reduce,
    "halving_doubling_all_reduce": halving_doubling_all_reduce,
}
NAMES = (*_ROOTED, *_ROOTLESS, "hierarchical_all_reduce")
"""Names of all schedules."""


def build(name: str, size: int, root: int = 0, hosts: Sequence[Hashable] | None = None) -> Schedule:
    """Build the schedule `name` for `size` ranks.

    Args:
        name: one of :data:`NAMES`.
        size: number of ranks, 1 or more.
        root: the source of a broadcast or the destination of a reduction; other algorithms ignore it.
        hosts: the host of each rank, for ``"hierarchical_all_reduce"``; by default all ranks are on one host.
    """
    if size < 1:
        raise UsageError(f"size={size}, but a schedule needs at least 1 rank")
    if not 0 <= root < size:
        raise UsageError(f"root={root} is not one of the ranks 0 to {size - 1}")
    if hosts is not None and len(hosts) != size:
        raise UsageError(f"hosts names {len(hosts)} hosts for {size} ranks; name the host of every rank")
    if name in _ROOTED:
        return _ROOTED[name](size, root)
    if name in _ROOTLESS:
        return _ROOTLESS[name](size)
    if name == "hierarchical_all_reduce":
        return hierarchical_all_reduce(hosts if hosts is not None else [0] * size)
    raise UsageError(f"unknown algorithm {name!r}; choose one of {', '.join(NAMES)}")
