"""Hugging Face classifiers and tokenizers, from the hub or a folder.

``transformers`` loads them. The checks here refuse models and tokenizers that load without an error but would train on
wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.tools import hub

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Padding tokens for tokenizers without one; any token works, because padding is masked."""


def folder_of(name: str, option: str = "--model") -> Path:
    """Return the folder of the model given as `option`; with ``--random-init`` it needs no weights."""
    folder = Path(name) if Path(name).is_dir() or option != "--model" else hub.cached_model(name)
    if folder is None or not (folder / "config.json").is_file():
        raise UsageError(f"{option} {name} has no config.json; give the folder of a Hugging Face model")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise UsageError(f"{option}: {folder} has no tokenizer; copy its tokenizer.json there")
    if option == "--model" and not hub.has_weights(folder):
        raise UsageError(f"{option} {name}: the folder has no weights; give one that save_pretrained() wrote")
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
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        # Not AutoTokenizer, which would choose a class from the configuration.
        file = str(folder / "tokenizer.json")
        tokenizer = load("tokenizer", folder, PreTrainedTokenizerFast, tokenizer_file=file)
    else:
        tokenizer = load("tokenizer", folder, AutoTokenizer.from_pretrained, str(folder))
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        names = [tokenizer.eos_token, *PADDING, tokenizer.unk_token]
        tokenizer.pad_token = next((name for name in names if name in tokenizer.get_vocab()), None)
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


def classifier(folder: Path, tokenizer: Any, dropout: float | None, *, is_random: bool) -> nn.Module:
    """Build a float32 classifier with two labels."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = load("classifier", folder, AutoConfig.from_pretrained, str(folder), num_labels=2)
    config.pad_token_id, config.use_cache = tokenizer.pad_token_id, False
    for name, value in config.to_dict().items() if dropout is not None else ():
        # The names of dropout probabilities depend on the architecture.
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, dropout)
    loaded: Any = AutoModelForSequenceClassification
    if is_random:
        # A small configuration may be combined with the tokenizer of a large model.
        config.vocab_size = max(config.vocab_size, len(tokenizer))
        return load("classifier", folder, loaded.from_config, config, dtype=torch.float32)  # type: ignore[no-any-return]
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    model, info = load("classifier", folder, loaded.from_pretrained, str(folder), **options)
    # Only the head and the pooler may be randomly initialized.
    body = [key for key in info["missing_keys"] if key.startswith(f"{model.base_model_prefix}.")]
    if lacking := sorted(key for key in body if "pooler" not in key):
        raise UsageError(
            f"the weights in {folder} lack {len(lacking)} of the model's tensors, such as {lacking[0]!r}; give the "
            "weights of this model, or --random-init"
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
