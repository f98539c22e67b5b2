"""A warning when all ranks train on the same samples, as with ``shuffle=True`` of torch's own DataLoader.

The first forward's inputs are digested; the control block of the first synchronized backward, which ranks exchange in
any case, has the digest. Later steps do nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from paceline.core.state.data_position import short
from paceline.core.state.device_streams import is_capturing
from paceline.core.state.digests import quick_digest
from paceline.core.state.rng import derive_seed
from paceline.core.telemetry.users_code import warn
from paceline.core.torch_internals.tensors import is_plain

ELEMENTS = 2**16
"""Elements of each tensor that are digested."""


def digest_of(inputs: Iterable[Tensor]) -> int:
    """Return a digest of a forward's inputs; 0 for inputs that are constant, as dummy ones are."""
    heads = [
        tensor.detach().reshape(-1)[:ELEMENTS]
        for tensor in inputs
        if is_plain(tensor) and tensor.numel() > 1 and not is_capturing(tensor.device)
    ]
    if all(bool((head == head[0]).all()) for head in heads):
        return 0
    return short(derive_seed("inputs", *(int(quick_digest(head)) for head in heads)))


def warn_of_equal(digests: list[int]) -> None:
    """Warn if the inputs were the same on all ranks."""
    if digests[0] and len(set(digests)) == 1 < len(digests):
        warn(
            f"the inputs of the first forward are the same on all {len(digests)} ranks, so all train on the same "
            "samples; let paceline.data.DataLoader split the data, or give torch's DataLoader "
            "sampler=DistributedSampler(dataset) in place of shuffle=True; if it is on purpose, ignore this"
        )
