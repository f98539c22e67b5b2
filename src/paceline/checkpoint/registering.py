"""What may be registered with a Checkpointer, and under which name."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from paceline.checkpoint.saved import GENERATORS, RANK_ROLE
from paceline.errors import UsageError

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_RESERVED = ("state", RANK_ROLE, GENERATORS)


def expect_registrable(name: Any, object: Any, registered: Container[str]) -> None:
    """Refuse a name that is malformed or one of those `registered`, and an object without a state.

    Raises:
        UsageError: says what to change.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(
            f"{name!r} cannot be the name of a registered object; use lower-case letters, digits and "
            f"underscores, and none of {', '.join(_RESERVED)}"
        )
    if name in registered:
        raise UsageError(f"an object is registered as {name!r} already; give this one another name")
    if not callable(getattr(object, "state_dict", None)) or not callable(getattr(object, "load_state_dict", None)):
        raise UsageError(
            f"the object to register as {name!r}, a {type(object).__qualname__}, does not have both "
            "state_dict and load_state_dict; give it these methods"
        )
