"""Hugging Face causal language models, from the hub or a folder, behind the interface of the recipe's own."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import MissingExtra, UsageError

ANSWER_S = 5.0
"""How long the hub may take to answer before it counts as out of reach."""


class CausalModel(nn.Module):
    """(batch, time) tokens to (batch, time, vocabulary) logits, by the Hugging Face model `name`, in float32.

    Raises:
        UsageError: if it cannot be loaded, or is not a causal language model.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {name} cannot be loaded: {one_line(error)}; give another model") from error

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def expect_fitting(name: str, tokens: int, context: int) -> None:
    """Refuse a model that lacks some of the tokenizer's `tokens`, or positions for `context` of them.

    Raises:
        UsageError: names both numbers.
    """
    path = find_file(name, "config.json")
    try:
        config = dict(json.loads(Path(path).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--model {name}: {path} cannot be read: {one_line(error)}") from error
    if (known := config.get("vocab_size", tokens)) < tokens:
        raise UsageError(
            f"--model {name} knows {known:,} tokens but the tokenizer has {tokens:,}; leave --tokenizer out"
        )
    positions = config.get("max_position_embeddings", config.get("n_positions", context))
    if positions < context:
        raise UsageError(f"--context {context} is more than the {positions:,} positions of --model {name}")


def one_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def find_file(name: str, file: str) -> str:
    """Return the path of `file` of the model `name`, a folder or a name on the hub, from where it may be fetched.

    Raises:
        MissingExtra: if transformers is not installed.
        UsageError: if the model or the file is not there, or cannot be fetched.
    """
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "recipes", "--model")
    if Path(name).is_dir():
        path = Path(name) / file
        if not path.is_file():
            raise UsageError(f"--model {name}: the folder has no {file}; give a folder that save_pretrained() wrote")
        return str(path)
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(cached := try_to_load_from_cache(name, file), str):
            return cached
        if not constants.HF_HUB_OFFLINE:  # of which the library speaks itself
            expect_hub(name)
        return str(hf_hub_download(name, file))
    except HFValidationError:
        raise UsageError(f"--model {name} is neither a folder nor a name of a model on the Hugging Face hub") from None
    except (HfHubHTTPError, OSError) as error:
        raise UsageError(f"--model {name}: {file} cannot be fetched from the hub: {one_line(error)}") from error


def expect_hub(name: str) -> None:
    """Refuse to go on where the hub cannot be reached; the library would try for half a minute, and say so six times.

    Raises:
        UsageError: names a way without network.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return  # an answer, of which the library makes more
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"--model {name} is neither a folder nor in the Hugging Face cache, and {endpoint} cannot be reached "
            f"({reason}); give the folder of a model, --model DIR, or leave --model out"
        ) from error
