"""The Hugging Face hub and its local cache. Missing files are downloaded once, before any rank starts."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import UsageError

Fetched = TypeVar("Fetched")
ANSWER_S = 4.0
"""Seconds to wait for an answer before the hub counts as unreachable."""
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OFFLINE = "HF_HUB_OFFLINE"


def work_offline() -> None:
    """Put the Hugging Face libraries into offline mode. Must be called before they are imported.

    Otherwise, if the hub is unreachable, the libraries retry for minutes before they fall back to the cache.
    """
    os.environ[OFFLINE] = "1"


def quiet_libraries() -> None:
    """Hide the warnings and progress bars of transformers, which every rank would print."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def fetch(subject: str, remedy: str, download: Callable[[], Fetched]) -> Fetched:
    """Call `download` for `subject`; an error message recommends `remedy`, the options that avoid a download."""
    if (reason := out_of_reach()) is not None:
        raise UsageError(f"{subject} is not on this machine, and {reason}; to run without a network, give {remedy}")
    try:
        return download()
    except Exception as error:  # the libraries raise many kinds of exceptions
        raise UsageError(f"cannot download {subject}: {one_line(error)}; try again, or give {remedy}") from error


def out_of_reach() -> str | None:
    """Return why the hub is unreachable, or None if it answers. Takes a few seconds at most."""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{OFFLINE} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    reasons: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            pass  # even an HTTP error shows that the hub is reachable
        except (OSError, ValueError) as error:
            reasons.append(one_line(getattr(error, "reason", error)))
        answered.set()

    # In a thread, because the timeout does not cover DNS: two unresponsive name servers take 20 s. Without this
    # check, huggingface_hub keeps retrying for 24 s up to several minutes.
    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(2 * ANSWER_S):
        reasons.append("no answer")
    return f"{endpoint} cannot be reached ({reasons[0]})" if reasons else None


def cached_config(name: str) -> Path | None:
    """Return the configuration of a model in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError as error:
        raise UsageError(f"{name!r} is neither a folder nor the name of a model: {one_line(error)}") from error
    return Path(config) if isinstance(config, str) else None


def cached_model(name: str) -> Path | None:
    """Return the folder of a complete model (configuration, tokenizer, weights) in the hub's cache, or None."""
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
    """Download a model's configuration, tokenizer and weights into the cache."""
    from huggingface_hub import snapshot_download

    # Most models have both safetensors and PyTorch files. Both are large, so the latter are only a fallback.
    if not has_weights(Path(snapshot_download(name, allow_patterns=MODEL_FILES))):
        snapshot_download(name, allow_patterns=["pytorch_model*"])
    if cached_model(name) is None:
        raise UsageError("it lacks a configuration, a tokenizer or weights that transformers can load")


def one_line(error: object) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
