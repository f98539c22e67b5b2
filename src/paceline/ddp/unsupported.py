"""torch's members that the wrapper inherits and does not support yet: each says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from paceline.errors import UsageError


class Unsupported:
    """Comes before torch's class among the wrapper's bases."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Not supported yet.

        Raises:
            UsageError: always.
        """
        raise UsageError("communication hooks are not supported by Paceline yet; leave register_comm_hook out")

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported yet.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "join() is not supported by Paceline yet; use paceline.data.GlobalBatchSampler, which gives every rank the "
            "same number of batches, and model.sync_gradients() for an empty one"
        )
