"""Models of Hugging Face: from a name on the hub or in its cache, a folder or a ``config.json``; without weights."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.hub import Absent, cached_config, fetch_all, one_line, quiet_libraries, work_offline
from paceline.errors import MissingExtra, UsageError
from paceline.tools.memory_estimate.built_model import BuiltModel

_HEADS_WITH_LABELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""Endings of the names of classes whose labels have the shape of their tokens."""


def build_hub_model(name: str) -> BuiltModel:
    """Build the model that a configuration describes.

    Raises:
        UsageError: if there is no such configuration, it cannot be fetched, or no model can be made from it.
        MissingExtra: without transformers.
    """
    path = _local_config(name)
    if path is None and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UsageError(
            f"{name!r} is not a model's name: give a name on the hub, a folder with a config.json, or a Python "
            "object as in package.module:build or model.py:build"
        )
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "recipes", f"the model {name!r}")
    path = path or _config_on_the_hub(name)
    # Before the import, at which the libraries read the setting.
    work_offline()
    import transformers

    quiet_libraries()
    try:
        # No code from the hub: an estimate must be safe for any name that a user types.
        config: Any = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        with torch.device("meta"):
            model: Any = _build(transformers, config)
    except Exception as error:  # of many classes
        raise UsageError(f"no model can be made from {path}: {one_line(error)}; give another configuration") from error
    text = config.get_text_config()
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    return BuiltModel(
        model,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        model.main_input_name,
        model.main_input_name == "input_ids" and type(model).__name__.endswith(_HEADS_WITH_LABELS),
        getattr(text, "max_position_embeddings", None),
    )


def _local_config(name: str) -> Path | None:
    """Return the configuration at the path `name`; None if there is no such file or folder."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"the folder {name} has no config.json; give one that save_pretrained() wrote")
        return path / "config.json"
    if path.is_file() and path.suffix != ".json":
        raise UsageError(f"{name} is not a configuration; give a config.json, or a Python object as in {name}:build")
    return path if path.is_file() else None


def _config_on_the_hub(name: str) -> Path:
    """Return the configuration of a model on the hub, fetched if it is not in the cache."""
    if (cached := cached_config(name)) is not None:
        return cached
    from huggingface_hub import hf_hub_download

    fetch = partial(hf_hub_download, name, "config.json")
    fetch_all([Absent(f"the configuration of {name}", "the path of a config.json", fetch)])
    fetched = cached_config(name)
    assert fetched is not None
    return fetched


def _build(transformers: Any, config: Any) -> nn.Module:
    # With the head that the configuration names, if it does; the classes below only tell whether it is causal.
    for name in config.architectures or ():
        if hasattr(transformers, name):
            built: nn.Module = getattr(transformers, name)(config)
            return built
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    automatic = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    model: nn.Module = automatic.from_config(config)
    return model
