"""Hugging Face causal language models, from the hub or a folder, behind the interface of the recipe's own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core import hub
from paceline.errors import UsageError


class CausalModel(nn.Module):
    """(batch, time) tokens to (batch, time, vocabulary) logits, by the model in `folder`, its weights in `dtype`.

    Raises:
        UsageError: if it cannot be loaded, or is not a causal language model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        hub.work_offline()  # before the import, at which the library reads the setting
        from transformers import AutoModelForCausalLM

        hub.quiet_libraries()
        try:
            self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        except Exception as error:  # of many classes
            raise UsageError(f"no causal language model can be made from {folder}: {hub.one_line(error)}") from error

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def folder_of(name: str) -> Path:
    """Return the folder of the model `name`: a folder itself, or a name on the hub, from which it is fetched once.

    Raises:
        UsageError: if there is no such model, or it cannot be fetched.
    """
    if (folder := Path(name)).is_dir():
        if not hub.has_weights(folder):
            raise UsageError(f"--model {name}: the folder has no weights; give one that save_pretrained() wrote")
        return folder
    remedy = "--model DIR, the folder of a model"
    if (cached := hub.cached_model(name)) is None:
        hub.fetch_all([hub.Absent(f"the model {name}", remedy, partial(hub.fetch_model, name))])
        cached = hub.cached_model(name)
    if cached is None:
        raise UsageError(
            f"the model {name} lacks its configuration, tokenizer or weights; give another one, or {remedy}"
        )
    return cached


def check_fitting(folder: Path, tokens: int, context: int) -> None:
    """Refuse a model that lacks some of the tokenizer's `tokens`, or positions for `context` of them.

    Raises:
        UsageError: names both numbers.
    """
    path = folder / "config.json"
    try:
        config = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--model: {path} cannot be read: {hub.one_line(error)}; give another model") from error
    known, positions = config.get("vocab_size"), config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(known, int) and known < tokens:
        raise UsageError(f"--model {folder} knows {known:,} tokens but the tokenizer {tokens:,}; leave --tokenizer out")
    if isinstance(positions, int) and positions < context:
        raise UsageError(f"--context {context} is more than the {positions:,} positions of --model {folder}")
