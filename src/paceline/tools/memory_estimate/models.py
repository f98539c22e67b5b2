"""Builds the model of an estimate without allocating memory, from a transformers configuration or from Python."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from contextlib import redirect_stdout
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.stacks import place_in
from paceline.errors import MissingExtra, UsageError
from paceline.tools.hub import cached_config, fetch, one_line, quiet_libraries, work_offline

LABEL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""Suffixes of transformers classes that take labels of the same shape as the tokens."""


class BuiltModel(NamedTuple):
    """A module on the meta device."""

    name: str
    module: nn.Module
    input_name: str | None = None
    """Name of the input of a transformers model; None for other modules, whose first argument is the input."""
    has_labels: bool = False
    """Whether the module also takes the tokens as labels and returns a loss."""


def build_model(name: str, dtype: torch.dtype | None, *, is_checkpointed: bool = False) -> BuiltModel:
    """Build the model `name` (``package.module:build``, ``model.py:Net``, a config.json or a hub name) in `dtype`.

    If `is_checkpointed`, a transformers model recomputes its layers in backward.
    """
    model = _from_python(name) if ":" in name else _from_configuration(name)
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise UsageError(f"{name} has no parameter that requires a gradient; name a model that can be trained")
    if dtype is not None:
        model.module.to(dtype)
    if is_checkpointed:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers 5 renames the method
                model.module.gradient_checkpointing_enable()  # type: ignore[operator]
        except (AttributeError, ValueError) as error:
            raise UsageError(
                f"{name} does not support --checkpointing, which is for models of Hugging Face; omit it, and call "
                "torch.utils.checkpoint in the model, which is counted"
            ) from error
    return model


def empty(module: nn.Module, device: str) -> None:
    """Give the module tensors without values on `device`."""

    @cache  # shared tensors stay shared
    def emptied(tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor, device=device)
        return nn.Parameter(result, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else result

    for part in module.modules():
        parameters = part.named_parameters(recurse=False, remove_duplicate=False)
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for name, value in [*parameters, *buffers, *vars(part).items()]:  # vars() also has plain attributes
            if isinstance(value, Tensor):
                setattr(part, name, emptied(value))


def described(error: BaseException) -> str:
    """Return an error's class, message and line in the user's code: ``KeyError: 'a' (x.py, line 3)``."""
    return f"{type(error).__name__}: {one_line(error).rstrip('.')}{place_in(error.__traceback__)}"


def _from_python(path: str) -> BuiltModel:
    source, _, attribute = path.rpartition(":")
    is_file = source.endswith(".py")
    # As by ``python file.py`` or ``python -m module``.
    sys.path.insert(0, str(Path(source).absolute().parent if is_file else Path.cwd()))
    try:
        with redirect_stdout(sys.stderr):  # because --json writes to stdout
            imported = importlib.import_module(Path(source).stem if is_file else source)
            target: Any = reduce(getattr, attribute.split("."), imported)
            with torch.device("meta"):
                module = target if isinstance(target, nn.Module) else target()
        empty(module, "meta")  # fails for values that are not modules, and for lazy layers, which have no shape yet
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise UsageError(
            f"{path} cannot be built: {described(error)}; name a module without lazy layers, or a function "
            "or class that returns one without arguments and without reading tensors' values, as in model.py:build"
        ) from error
    return BuiltModel(path, module)


def _from_configuration(name: str) -> BuiltModel:
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    is_local = path.is_file() and path.suffix == ".json"
    if not is_local and Path(name).exists():
        raise UsageError(
            f"{name!r} is not a model; give a name on the Hugging Face hub, a config.json or its folder, or a Python "
            "object as in package.module:build or model.py:build"
        )
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra("transformers", "recipes", f"the model {name!r}")
    if not is_local:
        path = _fetched(name)
    work_offline()  # before importing the libraries, which read the setting once
    import transformers

    quiet_libraries()
    try:
        # Never run code from the hub: an estimate must be safe for any model name.
        config: Any = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        with torch.device("meta"):
            model: Any = _instantiate(transformers, config)
        empty(model, "meta")
    except Exception as error:  # transformers raises many kinds of exceptions
        raise UsageError(f"no model can be made from {path}: {one_line(error)}; give another configuration") from error
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    is_causal = model.main_input_name == "input_ids" and type(model).__name__.endswith(LABEL_HEADS)
    return BuiltModel(name, model, model.main_input_name, is_causal)


def _fetched(name: str) -> Path:
    """Return the configuration of a model on the hub, after fetching it into the cache if needed."""
    from huggingface_hub import hf_hub_download

    download = partial(hf_hub_download, name, "config.json")
    return cached_config(name) or Path(fetch(f"the configuration of {name}", "the path of a config.json", download))


def _instantiate(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config(config)
