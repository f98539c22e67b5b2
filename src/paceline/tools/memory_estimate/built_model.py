"""A model that was built without memory, with the facts about its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.core.hub import one_line


@dataclass(frozen=True)
class BuiltModel:
    """A module on the meta device, or on the device of a module that the user has built already."""

    module: nn.Module
    dtype: torch.dtype | None = None
    """Dtype of the training, unless the user chooses another; None for the dtypes that the module has."""
    input_name: str | None = None
    """Name of the input of a model of transformers; None for a model whose first argument it is."""
    has_labels: bool = False
    """Whether it takes the tokens as labels, too, and computes a loss."""
    positions: int | None = None
    """Largest number of tokens that it takes, if that is known."""

    @property
    def is_of_transformers(self) -> bool:
        """Whether a library has built it, not the user's code."""
        return self.input_name is not None


def described(error: BaseException) -> str:
    """Return the class, the first line and the place of an error of the model's code: ``KeyError: 'a' (x.py, line 3)``.

    The place is the innermost line of the traceback that is neither torch's nor ours.
    """
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not ("importlib" in file or file.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent)))):
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    kind, reason = type(error).__name__, one_line(error)
    # An error without a text has its class as its one line.
    return f"{kind}{place}" if reason == kind else f"{kind}: {reason.rstrip('.')}{place}"
