"""Checks the shape of the code, and its size against ``budget.json``.

    python scripts/house.py            # run by `make check`: print every fault; exit code 1 if there is one
    python scripts/house.py --table    # the current numbers and the budget

A line of code is a line with a token other than a comment or docstring. Decision 0048 gives the reasons.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import prose
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
BUDGET = Path(__file__).with_name("budget.json")
FUNCTION_LINES = 60
FILE_LINES, FOLDER_ENTRIES = 600, 30  # more than this is reported, but is not a fault
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
CALLED_BY_OTHERS = frozenset({"Result", "Run", "World", "hook", "load_ipython_extension", "unload_ipython_extension"})
"""Public names that Paceline, torch or IPython calls, so their parameters are not options."""
FACTORIES = {f"torch.{function.__name__}" for function in _device_constructors()}
"""Functions that create a tensor on the default device."""
PUBLIC_MODULES = ("", ".checkpoint", ".compression", ".data", ".ddp", ".nn", ".optim", ".testing", ".train")


@cache
def code_lines(path: Path) -> int:
    """Return the number of lines of code in a file."""
    source = path.read_text("utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in prose.docstrings(ast.parse(source)):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def folder_lines(folder: Path) -> int:
    """Return the number of lines of code below `folder`."""
    return sum(code_lines(path) for path in folder.rglob("*.py"))


def public_names() -> dict[str, Any]:
    """Return the objects in ``__all__`` of the public modules, leaving out modules."""
    modules = [import_module(f"paceline{suffix}") for suffix in PUBLIC_MODULES]
    names = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name: value for name, value in names.items() if not inspect.ismodule(value)}


def options() -> int:
    """Return the number of command-line options and of parameters of public functions and classes."""
    import typer

    from paceline.tools.main import app
    from paceline.tools.recipes.commands import RECIPES, recipe_command
    from paceline.tools.run_options import help_parser

    total = sum("--help" not in action.option_strings for action in help_parser()._actions)
    total += len({parameter.name for recipe in RECIPES for parameter in recipe_command(recipe).params})
    commands = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        total += len(command.params)
        commands += getattr(command, "commands", {}).values()
    for name, value in public_names().items():
        if name not in CALLED_BY_OTHERS and not (isinstance(value, type) and issubclass(value, BaseException)):
            parameters = inspect.signature(value).parameters.values()
            total += sum(not str(parameter).startswith("*") for parameter in parameters)  # not *args and **options
    return total


def environment_variables() -> int:
    """Return the number of environment variables that appear in the source."""
    text = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    return len(set(re.findall(r"PACELINE_[A-Z_]*[A-Z]", text)))


def measured() -> dict[str, int]:
    """Return the current value of each number that has a budget."""
    numbers = {path.name: folder_lines(path) for path in sorted(SOURCE.iterdir()) if any(path.rglob("*.py"))}
    tools = numbers.pop("tools")
    for path in sorted((SOURCE / "tools").iterdir()):
        if path.name in ("explain", "memory_estimate", "recipes", "compare", "bench", "notebook", "plan"):
            numbers[f"tools/{path.name}"] = folder_lines(path)
            tools -= numbers[f"tools/{path.name}"]
    numbers["tools, others"] = tools
    numbers["pytest_paceline.py"] = code_lines(SOURCE.with_name("pytest_paceline.py"))
    numbers["src/paceline"] = folder_lines(SOURCE)
    numbers |= {name: folder_lines(ROOT / name) for name in ("tests", "scripts", "benchmarks")}
    numbers |= {"public names": len(public_names()), "options": options()}
    numbers["environment variables"] = environment_variables()
    return numbers | prose.rates()


def over_budget(numbers: dict[str, int], budget: dict[str, int]) -> Iterator[str]:
    """Yield a fault for each number that exceeds its budget, has no budget, or no longer exists."""
    for name in sorted(numbers.keys() | budget.keys()):
        if name not in budget:
            yield f"budget.json has no number for {name!r}, which has {numbers[name]:,}; add one and give the reason"
        elif name not in numbers:
            yield f"budget.json has a number for {name!r}, which does not exist; remove it"
        elif numbers[name] > budget[name]:
            excess = f"{numbers[name]:,}, but the budget is {budget[name]:,}"
            yield f"{name}: {excess}; delete something, or raise it in budget.json and give the reason"


def warnings() -> Iterator[str]:
    """Yield a remark for each long file and each full folder. They are not faults: only the subject decides."""
    for path in sorted((SOURCE, *SOURCE.rglob("*"))):
        if path.suffix == ".py" and (lines := code_lines(path)) > FILE_LINES:
            yield f"{path} has {lines} lines of code; does it hold two subjects?"
        elif path.name != "__pycache__" and (entries := len([*path.glob("[!_]*")])) > FOLDER_ENTRIES:
            yield f"{path} has {entries} entries; are they one subject?"


def faults_of(path: Path) -> Iterator[str]:
    """Yield a fault for each long function, and for each tensor on the default device."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name}() has {length} lines, at most {FUNCTION_LINES}"
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in FACTORIES:
            names = {keyword.arg for keyword in node.keywords}
            if not {"device", None} & names:  # None stands for **options, which may contain the device
                yield f"{path}:{node.lineno}: {name}() without device=, but users change the default device"


def _names_in(path: Path, tree: ast.Module) -> dict[str, str]:
    """Return the full name of each class that the file defines or imports, and of each imported module."""
    module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    names = {node.name: f"{module}.{node.name}" for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def single_use_bases() -> Iterator[str]:
    """Yield a fault for each class that is only the base of one other class, unless it is a protocol or abstract."""
    defined: set[str] = set()
    subclasses: Counter[str] = Counter()
    used: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        names = _names_in(path, tree)

        def full_name(node: ast.expr, names: dict[str, str] = names) -> str:
            first, _, rest = ast.unparse(node).split("[")[0].partition(".")
            return f"{names.get(first, first)}.{rest}".rstrip(".")

        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {full_name(base) for base in node.bases}
                defined.add(names[node.name])
                subclasses.update(bases)
                if {base.rpartition(".")[2] for base in bases} & {"Protocol", "ABC", "NamedTuple"}:
                    used.add(names[node.name])
            elif isinstance(node, ast.Call):
                used.add(full_name(node.func))
                # A class that is passed as an argument counts as used: Typer(cls=Commands).
                used.update(full_name(keyword.value) for keyword in node.keywords)
    for name in sorted(defined - used):
        if subclasses[name] == 1:
            yield f"class {name} is only the base of one class; merge the two, or let one hold the other"


def main() -> int:
    """Print all faults. Return 1 if there are any."""
    sys.path.insert(0, str(ROOT / "src"))
    numbers, budget = measured(), json.loads(BUDGET.read_text("utf-8"))
    if "--table" in sys.argv:
        for name in numbers:
            print(f"{name:24}{numbers[name]:8,} of {budget.get(name, 0):,}")
        return 0
    faults = [*over_budget(numbers, budget), *single_use_bases()]
    faults += [fault for path in sorted(SOURCE.rglob("*.py")) for fault in faults_of(path)]
    for line in [*(f"warning: {remark}" for remark in warnings()), *faults]:
        print(line, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
