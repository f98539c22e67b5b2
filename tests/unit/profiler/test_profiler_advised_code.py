"""Code shown in advice uses existing parameters of the called functions."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import paceline
import paceline.data
from paceline.profiler import advice

MODEL = paceline.DistributedDataParallel
NAMES = {"paceline": paceline, "torch": torch, "model": MODEL, "Checkpointer": paceline.Checkpointer}
CALL, SETTING = re.compile(r"([A-Za-z][\w.]*)\(([^()]*)\)"), re.compile(r"\b([a-z_]+)=")
SETTABLE: tuple[Callable[..., Any], ...] = (
    MODEL,
    paceline.data.DataLoader,
    torch.utils.data.DataLoader,
    paceline.Checkpointer,
)


def texts() -> Iterator[str]:
    """Yield the text of each piece of advice, with 1 for each value."""
    for node in ast.walk(ast.parse(Path(advice.__file__).read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def check(name: str, arguments: str) -> None:
    """Raise if the function does not accept these arguments; an ellipsis stands for others."""
    first, *attributes = name.split(".")
    function: Any = NAMES[first]
    for attribute in attributes:
        function = getattr(function, attribute)
    call = ast.parse(f"f({arguments.replace('…', 'None')})", mode="eval").body
    assert isinstance(call, ast.Call)
    bound = [MODEL] if first == "model" else []  # bound to the method's self
    signature = inspect.signature(function)
    signature.bind_partial(*bound, *call.args, **{word.arg or "": word.value for word in call.keywords})
    variables = {word.id for word in call.args if isinstance(word, ast.Name)} - {"model"}
    assert variables <= signature.parameters.keys(), f"{name}({arguments})"


def test_code_in_advice_matches_the_signatures_it_calls() -> None:
    """Advice showed ``paceline.accumulate(model, batches, steps)``, but the parameter is called ``every``."""
    calls = [match for text in texts() for match in CALL.findall(text) if match[0].split(".")[0] in NAMES]
    for name, arguments in calls:
        check(name, arguments)
    assert {name for name, _ in calls} >= {"paceline.accumulate", "model.no_sync", "Checkpointer", "torch.autocast"}
    known = {name for function in SETTABLE for name in inspect.signature(function).parameters}
    settings = {name for text in texts() for name in SETTING.findall(CALL.sub("", text))}
    assert {"num_workers", "bucket_cap_mb"} <= settings <= known, settings - known
