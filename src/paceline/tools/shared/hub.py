"""The Hugging Face hub and its caches on this machine. Absent files are fetched once, before any rank starts."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

ANSWER_S = 4.0
"""Seconds that the hub may take to answer before it counts as out of reach."""
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OFFLINE = "HF_HUB_OFFLINE"


@dataclass(frozen=True)
class Absent:
    """A model or data that this machine does not have."""

    what: str
    """Name for messages, such as ``the model gpt2``."""
    remedy: str
    """Options that make the program run without it."""
    fetch: Callable[[], Any]


def work_offline() -> None:
    """Keep Hugging Face's libraries from asking the hub in this process: call it before they are imported.

    Where the hub cannot be reached, they would try for minutes before they use the cache.
    """
    os.environ[OFFLINE] = "1"


def quiet_libraries() -> None:
    """Keep transformers from showing progress of its own, and warnings that our messages replace, on every rank."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def fetch_all(absent: Sequence[Absent]) -> None:
    """Fetch the files that this machine lacks."""
    if not absent:
        return
    if (reason := out_of_reach()) is not None:
        what, remedies = (" and ".join(getattr(each, name) for each in absent) for name in ("what", "remedy"))
        are = "are" if len(absent) > 1 else "is"
        raise UsageError(f"{what} {are} not on this machine, and {reason}; to run without network, give {remedies}")
    for each in absent:
        try:
            each.fetch()
        except Exception as error:  # the libraries', of many classes
            raise UsageError(f"{each.what} cannot be fetched: {one_line(error)}; or give {each.remedy}") from error


def out_of_reach() -> str | None:
    """Return the reason why the hub cannot be asked, or None if it answers; takes seconds at most."""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{OFFLINE} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    reasons: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            pass  # an answer, so the hub is in reach
        except (OSError, ValueError) as error:
            reasons.append(one_line(getattr(error, "reason", error)))
        answered.set()

    # A thread, because no limit holds for a name server that does not answer: with two such, urllib and
    # huggingface_hub take 20 s. Without a probe, huggingface_hub tries for 24 s to minutes.
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(2 * ANSWER_S):
        reasons.append("no answer")
    return f"{endpoint} cannot be reached ({reasons[0]})" if reasons else None


def cached_config(name: str) -> Path | None:
    """Return the configuration of a model in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise UsageError(f"{name!r} is neither a folder nor the name of a model: {one_line(error)}") from error
    return Path(config) if isinstance(config, str) else None


def cached_model(name: str) -> Path | None:
    """Return the folder in the hub's cache that has a whole model: configuration, tokenizer and weights; or None."""
    config = cached_config(name)
    if config is None:
        return None
    folder = config.parent
    has_tokenizer = any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    return folder if has_tokenizer and has_weights(folder) else None


def has_weights(folder: Path) -> bool:
    """Return whether a folder has the weights of a model."""
    return any((folder / file).exists() for file in WEIGHT_FILES)


def fetch_model(name: str) -> None:
    """Fetch a model's configuration, tokenizer and weights into the cache."""
    from huggingface_hub import snapshot_download

    # The files of PyTorch are fetched only where there are no safetensors: most models have both, and each is large.
    if not has_weights(Path(snapshot_download(name, allow_patterns=MODEL_FILES))):
        snapshot_download(name, allow_patterns=["pytorch_model*"])
    if cached_model(name) is None:
        raise UsageError("it has no configuration, no tokenizer or no weights for transformers")


def one_line(error: object) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
