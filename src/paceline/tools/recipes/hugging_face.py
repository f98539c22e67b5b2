"""Hugging Face classifiers and tokenizers, from the hub or a folder.

``transformers`` loads them. The checks here refuse models and tokenizers that load without an error but would train on
wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tools.shared import hub


def fetch_model(name: str, remedy: str) -> None:
    """Download the model `name`, unless it is a folder or already in the cache."""
    if not Path(name).is_dir() and hub.cached_model(name) is None:
        hub.fetch(f"the model {name}", remedy, partial(hub.fetch_model, name))


def folder_of(name: str) -> Path:
    """Return the folder of a model that is complete: a folder, or one in the hub's cache."""
    folder = Path(name) if Path(name).is_dir() else hub.cached_model(name)
    assert folder is not None, "fetch_model() has downloaded it"
    lacking = [file for file in ("config.json", "tokenizer_config.json") if not (folder / file).is_file()]
    if not hub.has_weights(folder):
        lacking.append("weights")
    if lacking:
        raise UsageError(
            f"--model {name} has no {lacking[0]}; give a folder that "
            "save_pretrained() wrote for a model and its tokenizer"
        )
    return folder


def load(kind: str, folder: Path, function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a transformers `function` that loads `kind` from `folder`, and report errors in one line."""
    hub.quiet_libraries()
    try:
        return function(*arguments, **options)
    except Exception as error:  # transformers raises many kinds of exceptions
        raise UsageError(f"no {kind} can be made from {folder}: {hub.one_line(error)}") from error


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder`, with right padding and a padding token."""
    from transformers import AutoTokenizer

    tokenizer = load("tokenizer", folder, AutoTokenizer.from_pretrained, str(folder))
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token  # any token works, because padding is masked
    if tokenizer.pad_token is None:
        raise UsageError(f"the tokenizer in {folder} has no token to pad with; name one as pad_token in its config")
    return tokenizer


def validate_known(tokenizer: Any, rows: Sequence[Sequence[int]]) -> None:
    """Reject a tokenizer that does not know most of the text, such as one for another language."""
    total, unknown = sum(map(len, rows)), sum(row.count(tokenizer.unk_token_id) for row in rows)
    if 2 * unknown > total:
        raise UsageError(
            f"the tokenizer with {len(tokenizer):,} tokens does not know {unknown / total:.0%} of the text; give all "
            "of its files, or a tokenizer for the language of the text"
        )


def classifier(folder: Path, tokenizer: Any) -> nn.Module:
    """Build a float32 classifier with two labels."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = load("classifier", folder, AutoConfig.from_pretrained, str(folder), num_labels=2)
    config.pad_token_id, config.use_cache = tokenizer.pad_token_id, False
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    function = AutoModelForSequenceClassification.from_pretrained
    model, info = load("classifier", folder, function, str(folder), **options)
    # Only the head and the pooler may be randomly initialized.
    body = [key for key in info["missing_keys"] if key.startswith(f"{model.base_model_prefix}.")]
    if lacking := sorted(key for key in body if "pooler" not in key):
        raise UsageError(
            f"the weights in {folder} lack {len(lacking)} of the model's tensors, such as {lacking[0]!r}; give "
            "the weights of this model"
        )
    return model  # type: ignore[no-any-return]


def validate_fitting(model: Any, tokens: int, length: int) -> None:
    """Check that the model has embeddings for all `tokens` of the tokenizer and for texts of this `length`."""
    vocabulary, config = model.get_input_embeddings().weight.shape[0], model.config.to_dict()
    if tokens > vocabulary:
        raise UsageError(
            f"the tokenizer has {tokens:,} tokens but the model has only {vocabulary:,}; give the model's tokenizer"
        )
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(positions, int) and length > positions:
        raise UsageError(f"pairs have {length:,} tokens but the model has {positions:,} positions; lower --max-length")
