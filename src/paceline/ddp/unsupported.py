"""torch's members that the wrapper inherits and does not support yet: each says so."""

from __future__ import annotations

from typing import NoReturn

from paceline.errors import UsageError


class Unsupported:
    """Comes before torch's class among the wrapper's bases."""

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a DistributedDataParallel cannot be copied or pickled, as its buckets and channel belong to this process; "
            "copy paceline.unwrap(model) and wrap the copy"
        )
