"""Classifiers of sentence pairs: a Hugging Face model with a classification head, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.hub import has_weights, one_line
from paceline.errors import UsageError
from paceline.tools.recipes.paraphrases.data import Pair, TokenizedPairs, Tokens

NOT_A_MODEL = ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json", "adapter_config.json")
TOKENIZER_FILES = ("vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Tokens to pad with where the tokenizer does not say which one; the mask covers them, so any does."""


@dataclass(frozen=True)
class Source:
    """The files of a model."""

    config: Path
    tokenizer: Path
    """A folder, or the file of a single tokenizer."""
    weights: Path | None
    """Folder with weights; None for random ones."""


def source_in(folder: Path, option: str) -> Source:
    """Return the files of a model in a folder as ``save_pretrained`` writes it.

    Raises:
        UsageError: if something is not there.
    """
    source = random_source(folder, option)
    if not has_weights(folder):
        raise UsageError(f"{option} {folder} has no weights; to start from random ones, give --random-init {folder}")
    return Source(source.config, source.tokenizer, folder)


def random_source(place: Path, option: str = "--random-init") -> Source:
    """Return the files of a model without weights, in a folder, or beside a configuration file.

    Raises:
        UsageError: if there is no configuration, or no tokenizer beside it.
    """
    if place.is_file():
        config, folder = place, place.parent
    elif place.is_dir():
        config, folder = _the_one(place, "config.json", option, NOT_A_MODEL), place
    else:
        raise UsageError(f"{option} {place}: there is no such folder or file")
    try:
        known = "model_type" in json.loads(config.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{option}: {config} cannot be read: {one_line(error)}") from error
    if not known:
        raise UsageError(f"{option}: {config} has no model_type, so it is not the configuration of a model")
    if (folder / "tokenizer_config.json").is_file():
        return Source(config, folder, None)
    if any(folder.glob("*tokenizer.json")):
        return Source(config, _the_one(folder, "tokenizer.json", option), None)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return Source(config, folder, None)
    raise UsageError(f"{option}: there is no tokenizer beside {config}; put its tokenizer.json there")


def _the_one(folder: Path, name: str, option: str, others: tuple[str, ...] = ()) -> Path:
    """Return the file `name`, or else the only one whose name ends so."""
    if (folder / name).is_file():
        return folder / name
    found = sorted(path for path in folder.glob(f"*{name}") if path.name not in others)
    if len(found) == 1:
        return found[0]
    several = f": there are {', '.join(path.name for path in found)}" if found else ""
    raise UsageError(f"{option} {folder} has no {name}{several}; give the folder of a Hugging Face model")


def load_tokenizer(source: Source) -> Any:
    """Load the tokenizer, which has a padding token afterwards.

    Raises:
        UsageError: if it cannot be loaded, or nothing to pad with is known.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if source.tokenizer.is_file():
            # Not AutoTokenizer, which would take a class from the configuration, with rules of its own.
            fast: Any = PreTrainedTokenizerFast  # the library's function has no types
            tokenizer: Any = fast(tokenizer_file=str(source.tokenizer))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(source.tokenizer))
    except Exception as error:  # of many classes
        raise UsageError(f"the tokenizer in {source.tokenizer} cannot be loaded: {one_line(error)}") from error
    if tokenizer.pad_token is None:
        known = tokenizer.get_vocab()
        names = [tokenizer.eos_token, *PADDING, tokenizer.unk_token]
        tokenizer.pad_token = next((name for name in names if name in known), None)
    if tokenizer.pad_token is None:
        raise UsageError(
            f"the tokenizer in {source.tokenizer} has no token to pad with; name one as pad_token in a "
            "tokenizer_config.json beside it"
        )
    return tokenizer


def tokenize(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> TokenizedPairs:
    """Return the pairs as at most `max_length` tokens each.

    Where the tokenizer would put nothing between the two sentences, a new line stands there.

    Raises:
        UsageError: if the tokenizer knows hardly any of the words.
    """
    options = {"truncation": True, "max_length": max_length, "padding": False, "return_attention_mask": False}
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    if tokenizer.num_special_tokens_to_add(pair=True) > tokenizer.num_special_tokens_to_add(pair=False):
        encoded = tokenizer(first, second, **options)
    else:
        encoded = tokenizer([f"{one}\n{other}" for one, other in zip(first, second, strict=True)], **options)
    ids = encoded["input_ids"]
    total, unknown = sum(map(len, ids)), sum(row.count(tokenizer.unk_token_id) for row in ids)
    # A tokenizer of another language still gives tokens, and the training would learn nothing from them.
    if 2 * unknown > total:
        raise UsageError(
            f"the tokenizer, which has {len(tokenizer):,} tokens, does not know {unknown / total:.0%} of the text; "
            "its files are incomplete, or for another language"
        )
    types = encoded.get("token_type_ids") or [None] * len(ids)
    return TokenizedPairs([Tokens(*row) for row in zip(ids, types, (pair.label for pair in pairs), strict=True)])


def build_model(source: Source, tokenizer: Any, dropout: float | None) -> tuple[nn.Module, str | None]:
    """Build the classifier in float32; return it with a line for the user on what is special about it, or None.

    The caller seeds the random weights. Without weights to load, the vocabulary grows to the tokenizer's.

    Raises:
        UsageError: if the model cannot be built, or its weights do not fit.
    """
    import transformers

    classifier: Any = transformers.AutoModelForSequenceClassification  # the library's class has no types
    note = None
    try:
        config = transformers.AutoConfig.from_pretrained(str(source.config), num_labels=2)
        config.pad_token_id, config.use_cache = tokenizer.pad_token_id, False
        if dropout is not None:
            _set_dropout(config, dropout)
        if source.weights is None:
            if len(tokenizer) > config.vocab_size:
                note = f"the vocabulary has the tokenizer's {len(tokenizer):,} tokens, not {config.vocab_size:,}"
                config.vocab_size = len(tokenizer)
            return classifier.from_config(config, dtype=torch.float32), note
        model, loaded = classifier.from_pretrained(
            str(source.weights), config=config, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # of many classes
        place = source.config if source.weights is None else source.weights
        raise UsageError(f"no classifier can be made from {place}: {one_line(error)}") from error
    return model, _new_weights(model, set(loaded["missing_keys"]), source)


def _new_weights(model: Any, missing: set[str], source: Source) -> str | None:
    """Return a line that names the parameters with random values; refuse any outside the head."""
    # A pooler is trained with the head: checkpoints of language models need not have one.
    body = sorted(name for name in missing if name.startswith(f"{model.base_model_prefix}.") and "pooler" not in name)
    if body:
        raise UsageError(
            f"the weights in {source.weights} lack {len(body)} of the model's tensors, such as {body[0]!r}; "
            "they are of another model, or --random-init builds it without weights"
        )
    return f"{', '.join(sorted(missing))} start from random values" if missing else None


def _set_dropout(config: Any, dropout: float) -> None:
    """Set every probability of dropout in a configuration; architectures have different names for them."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, dropout)


def check_fitting(model: Any, pairs: Sequence[TokenizedPairs]) -> None:
    """Refuse data that the model has no embeddings for.

    Raises:
        UsageError: names the numbers.
    """
    size = model.get_input_embeddings().weight.shape[0]
    largest = max(max(sample.ids) for part in pairs for sample in part.samples)
    if largest >= size:
        raise UsageError(f"the tokenizer gives token {largest:,} but the model knows {size:,}; it is of another model")
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = max(max(part.lengths) for part in pairs)
    if positions is not None and longest > positions:
        raise UsageError(f"the longest pair has {longest} tokens, the model {positions} positions; lower --max-length")
