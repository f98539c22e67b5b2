"""Pages generated from the repository: API reference, decisions, results, and linked files."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
OTHERS = "Module, DistributedDataParallel, BaseException, ImportError, Dataset, object"
"""Base classes outside Paceline, whose members are documented elsewhere."""
MEMBERS = f"   :members:\n   :inherited-members: {OTHERS}\n"

ORPHAN = "---\norphan: true\n---\n"
"""Front matter of a page that is not in the sidebar."""


def toctree(caption: str, entries: Iterable[str], hidden: bool = True) -> str:
    """Return a section of the sidebar in MyST Markdown."""
    options = f":caption: {caption}\n" + (":hidden:\n" if hidden else "")
    return "```{toctree}\n" + options + "\n" + "".join(f"{entry}\n" for entry in entries) + "```\n"


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of `module`, except modules."""
    listed = getattr(module, "__all__", None)
    names = listed if listed is not None else [name for name in vars(module) if not name.startswith("_")]

    def is_ours(value: object) -> bool:
        return not inspect.ismodule(value) and getattr(value, "__module__", "").startswith("paceline")

    return [name for name in names if is_ours(getattr(module, name))]


def public_modules(package: ModuleType) -> list[ModuleType]:
    """Return the package and its public modules."""
    values = [getattr(package, name) for name in package.__all__]
    testing = import_module("paceline.testing")  # `import paceline` does not load it
    return [package, *filter(inspect.ismodule, values), testing]


def documented(package: ModuleType) -> dict[str, dict[str, str]]:
    """Return, for each public module, its names and the full name under which each is documented.

    An object of several modules is documented once, in the one nearest to the top.
    """
    described: dict[int, str] = {}
    modules: dict[str, dict[str, str]] = {}
    for module in public_modules(package):
        path = module.__name__
        modules[path] = {
            name: described.setdefault(id(getattr(module, name)), f"{path}.{name}") for name in public_names(module)
        }
    return modules


def reference_page(module: ModuleType, names: Mapping[str, str]) -> str:
    """Return the page of `module`. Like the docstrings, it is in reStructuredText."""
    path = module.__name__
    lines = [path, "=" * len(path), "", ".. highlight:: python", "", f".. automodule:: {path}", "   :no-members:", ""]
    values = {name: getattr(module, name) for name in names}
    # autosummary finds no text for a callable instance.
    others = {name: value for name, value in values.items() if callable(value) and not hasattr(value, "__name__")}
    items = [f"   ~{full.removeprefix(path + '.')}" for name, full in names.items() if name not in others]
    described = [f":func:`{name}`: {value.__doc__.partition('.')[0]}." for name, value in others.items()]
    lines += [".. autosummary::", "   :nosignatures:", "", *items, "", *described, ""]
    for name, value in values.items():
        if names[name] == f"{path}.{name}":
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            lines += [f".. auto{kind}:: {path}.{name}", MEMBERS if kind == "class" else ""]
    return "\n".join(lines)


def decisions_page(folder: Path) -> str:
    """Return the index of decisions and its sidebar entries."""
    pages = sorted(folder.glob("[0-9]*.md"))
    return (folder / "README.md").read_text("utf-8") + "\n" + toctree("Decisions", [page.stem for page in pages])


def benchmarks_page(results: Path) -> str:
    """Return a table of all results with date, machine and torch version."""
    rows = []
    for file in sorted(results.glob("*.json"), reverse=True):
        content = json.loads(file.read_text("utf-8"))
        date, name = file.stem[:10], file.stem[11:]
        ranks = content.get("ranks", content.get("world_size", ""))
        link = f"[{name}](../benchmarks/results/{file.name})"
        cells = (date, link, content.get("machine", ""), content.get("torch", ""), ranks)
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n")
    return (
        "# Benchmarks\n\nEvery result, with its date. `make bench` measures again; "
        "[What is measured](measurements.md) explains the main ones.\n\n"
        "| date | result | machine | torch | ranks |\n|---|---|---|---|---|\n" + "".join(rows)
    )


def json_page(file: Path) -> str:
    """Return the page on JSON output: a list of fields for each command."""
    parts = [
        "# JSON output\n\nEvery document begins with its version, which changes if a field is removed or gets another "
        "meaning, but not if a field is added. A word in capitals stands for keys that depend on the run.\n"
    ]
    for command, described in json.loads(file.read_text("utf-8")).items():
        fields = (f"- `{name}`" + f": {meaning}" * bool(meaning) for name, meaning in described["fields"].items())
        parts.append(f"## `{command}`\n\n{described['about']}\n\n" + "\n".join(fields) + "\n")
    return "\n".join(parts)


def source_page(path: str, file: Path) -> str:
    """Return a page with the text of a linked file, or a list of the files in a linked folder."""
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if child.suffix == ".py")
        return f"{ORPHAN}# {path}\n\n" + "".join(f"- [{name}]({file.name}/{name})\n" for name in names)
    language = LANGUAGES.get(file.suffix, "text")
    text = file.read_text("utf-8").rstrip()
    return f"{ORPHAN}# {file.name}\n\n`{path}`\n\n~~~~~~~~{{code-block}} {language}\n{text}\n~~~~~~~~\n"
