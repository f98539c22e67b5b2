"""The model of an estimate: a configuration of transformers or an object in the user's code, built without memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import MissingExtra, UsageError
from paceline.tools.shared.hub import Absent, cached_config, fetch_all, one_line, quiet_libraries, work_offline

LABEL_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""Endings of transformers' classes whose labels have the shape of their tokens."""


@dataclass(frozen=True)
class BuiltModel:
    """A module on the meta device, or a module that the user's code had already built."""

    name: str
    module: nn.Module
    dtype: torch.dtype | None = None
    """Dtype in which it is trained unless the user chooses another; None for its own dtypes."""
    input_name: str | None = None
    """Name of its main input if transformers built it; None if its first argument is the input."""
    has_labels: bool = False
    """Whether it also takes the tokens as labels and returns a loss."""
    positions: int | None = None
    """Largest sequence length, if known."""


def build_model(name: str) -> BuiltModel:
    """Build the model `name`: ``package.module:build``, ``model.py:Net``, a config.json or a hub name."""
    module, colon, attribute = name.rpartition(":")
    words = attribute.split(".") + ([] if module.endswith(".py") else module.split("."))
    is_import_path = bool(colon) and all(word.isidentifier() for word in words)
    return _from_python(name) if is_import_path else _from_configuration(name)


def _from_python(path: str) -> BuiltModel:
    where, _, attribute = path.rpartition(":")
    with redirect_stdout(sys.stderr):  # because --json writes to stdout
        source = _call(
            path,
            "cannot be imported",
            "name one that Python can import from here, as in package.module:build or model.py:build",
            partial(_import, where),
        )
        try:
            target = reduce(getattr, attribute.split("."), source)
        except AttributeError:
            raise UsageError(f"{path}: {where} has no {attribute!r}; name a function, a class or a module") from None
        if isinstance(target, nn.Module):
            return BuiltModel(path, target)
        if not callable(target):
            raise UsageError(f"{path} is of type {type(target).__name__}; name a function that returns an nn.Module")
        _check_no_arguments(path, target)
        with torch.device("meta"):
            built = _call(
                path,
                "failed on the meta device, where tensors have no values",
                "correct it, or name a module that is built already, such as that of a line model = Net() in the file",
                target,
            )
    if not isinstance(built, nn.Module):
        raise UsageError(f"{path} returned a value of type {type(built).__name__}; return an nn.Module")
    return BuiltModel(path, built)


def _import(where: str) -> Any:
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        return importlib.import_module(where)
    path = Path(where).absolute()
    if not path.is_file():
        raise UsageError(f"there is no file {where}; name a Python file, as in model.py:build")
    sys.path.insert(0, str(path.parent))
    # Under another name, so that a file model.py does not replace an installed module model.
    spec = importlib.util.spec_from_file_location(f"estimated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _check_no_arguments(path: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except ValueError:
        pass  # a function written in C that does not reveal its arguments
    except TypeError as error:
        raise UsageError(
            f"{path} takes arguments ({error}); name a function without any that builds the model, such as "
            f"def build(): return {path.rpartition(':')[2]}(…)"
        ) from None


def _call(path: str, failure: str, remedy: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} {failure}: {described(error)}; {remedy}") from error


def described(error: BaseException) -> str:
    """Return an error's class, first line and the user's line that raised it: ``KeyError: 'a' (x.py, line 3)``."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not ("importlib" in file or file.startswith((str(Path(torch.__file__).parent), str(Path(__file__).parent)))):
            place = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    kind, reason = type(error).__name__, one_line(error)
    return f"{kind}{place}" if reason == kind else f"{kind}: {reason.rstrip('.')}{place}"


def _from_configuration(name: str) -> BuiltModel:
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
        if not path.is_file():
            raise UsageError(f"the folder {name} has no config.json; give one that save_pretrained() wrote")
    elif path.is_file() and path.suffix != ".json":
        raise UsageError(f"{name} is not a configuration; give a config.json, or a Python object as in {name}:build")
    elif not path.is_file() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UsageError(
            f"{name!r} is not a model's name: give a name on the hub, a folder with a config.json, or a Python "
            "object as in package.module:build or model.py:build"
        )
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra("transformers", "recipes", f"the model {name!r}")
    if not path.is_file():
        path = _fetched(name)
    work_offline()  # before the import, when the libraries read the setting
    import transformers

    quiet_libraries()
    try:
        # No code from the hub: an estimate must be safe for any name that a user types.
        config: Any = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        with torch.device("meta"):
            model: Any = _instantiate(transformers, config)
    except Exception as error:  # of many classes
        raise UsageError(f"no model can be made from {path}: {one_line(error)}; give another configuration") from error
    text = config.get_text_config()
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    return BuiltModel(
        name,
        model,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        model.main_input_name,
        model.main_input_name == "input_ids" and type(model).__name__.endswith(LABEL_HEADS),
        getattr(text, "max_position_embeddings", None),
    )


def _fetched(name: str) -> Path:
    """Return the configuration of a model on the hub, after fetching it into the cache if needed."""
    if (cached := cached_config(name)) is None:
        from huggingface_hub import hf_hub_download

        fetch = partial(hf_hub_download, name, "config.json")
        fetch_all([Absent(f"the configuration of {name}", "the path of a config.json", fetch)])
        cached = cached_config(name)
    assert cached is not None
    return cached


def _instantiate(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config(config)
