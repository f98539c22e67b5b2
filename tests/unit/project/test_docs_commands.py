"""The commands that README and docs print run as printed, in an environment without the extras.

The indented command lines of a page run in one folder, in turn. What
stands for the reader's own files (``script.py``, ``MODEL``) is put there. What only an extra brings cannot be imported;
what needs one must say so, its page must name what to install, and then it runs with it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.utils.data._utils.worker
from packaging.requirements import Requirement
from test_docs import CHECKPOINTS, PAGES, ROOT, blocks

from paceline.tools.recipes.configs import DigitsConfig
from processes import paceline, run_here

LINE = re.compile(r"^    ((?:paceline|make|python|torchrun|pip|cp|[A-Z_]+=\S+) .*?)(?: {2,}.*)?$", re.MULTILINE)
NOT_RUN = {
    r"make ": "CI runs the targets themselves",
    r"pip install ": "it is pip's",
    r"NODE_RANK=": "two hosts: test_launch_hosts.py has two launchers",
    r"paceline run --nnodes 2": "two hosts: test_two_hosts.py has network namespaces",
    r".*--nproc gpu": "needs GPUs",
    r".*gpu_check.py": "test_gpu_check.py runs it",
    r".*pytest tests/buggy": "test_testing.py runs it",
    r"paceline top": "shows a job that runs: test_top.py",
    r"paceline train mrpc( --nproc 2)?( --precision.*| --balance)?$": "fetches from the hub: test_mrpc_cli.py",
    r"paceline train (mrpc|lm) .*": "takes minutes: the recipes' own tests run them, shorter",
    r"paceline train digits .*--virtual-ranks": "test_recipes_virtual_ranks.py compares the bits of such runs",
    r"paceline train digits .*--checkpoint-dir": "test_digits_cli.py saves and resumes",
    r"paceline explain (?!ring --ranks 5)": "test_explain.py draws every subject",
    r"paceline estimate-memory HuggingFaceTB": "fetches from the hub: test_memory_estimate.py",
    r"paceline profile (--compare|report)": "needs files of earlier runs: test_profiler_programs.py",
    r"paceline plan PROFILE": "docs/planning.md plans with profiles",
    r"paceline bench collectives": "takes a minute: test_bench.py",
    r"paceline compare ": "takes a minute: test_compare.py",
    r".*examples/(plain|resilient)_loop.py": "test_examples.py runs them",
    r"paceline run --nproc 2 train.py$": "README's first command, for another name of its script",
    r"paceline run --nproc 4 .*train.py": "test_launch_preemption.py and test_launch_elastic.py have such jobs",
    r"paceline profile --nproc 2 train.py": "README's second command, for another name of its script",
}
"""Commands that are not run here, and where they are; their options are checked all the same."""
MISSING = re.compile(r"run: pip install .*\[(\w+)\]|ModuleNotFoundError: No module named '(\w+)'")
STANDS_FOR = {"MODEL": "model.py:build"}


def commands(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [command.strip() for command in LINE.findall(text)]


def reason(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)


@cache
def base_distributions() -> frozenset[str]:
    """Return the distributions that come with Paceline alone, by their normalized names."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    found: set[str] = set()
    ahead = ["paceline"]
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        found.add(name)
        needed = [Requirement(row) for row in requires(name) or []]
        ahead += [normal(row.name) for row in needed if row.marker is None or row.marker.evaluate({"extra": ""})]
    return frozenset(found)


@cache
def extras() -> list[str]:
    """Return the modules that only extras bring."""
    return sorted(
        name
        for name, owners in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in base_distributions() for owner in owners)
    )


class BaseFinder(PathFinder):
    """Finds modules in files, but for those that are hidden."""

    hidden: Sequence[str] = ()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname in cls.hidden else super().find_spec(fullname, path, target)


def hide(hidden: list[str]) -> None:
    """Let modules be missing from this process, which may have loaded them, and the recipe make few passes."""
    DigitsConfig.passes = 2
    BaseFinder.hidden = hidden
    sys.meta_path[sys.meta_path.index(PathFinder)] = BaseFinder
    if "numpy" in hidden:  # which torch has looked for already, for the workers of loaders
        torch.utils.data._utils.worker.HAS_NUMPY = False  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]


def prepare(folder: Path) -> None:
    """Put what a page takes for granted into `folder`: the clone's programs, and the reader's script."""
    for name in ("examples", "benchmarks", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    [first, *_] = blocks(ROOT / "README.md")
    (folder / "script.py").write_text(first["shown"])
    batch = 'int(sys.argv[-1]) if sys.argv[-2:-1] == ["--batch-size"] else 256'
    (folder / "train.py").write_text("import sys\n" + first["shown"].replace("batch_size=256", f"batch_size={batch}"))
    (folder / "model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(8, 8)\n")


FIRST = {row: page for page in reversed(PAGES) for row in commands(page) if not reason(row)}
"""The page for which a command is run, though others print it, too."""
WALKS = {page: walk for page in PAGES if (walk := [row for row in commands(page) if FIRST.get(row) == page])}


def forked(command: str, folder: Path, hidden: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy of an interpreter that has loaded torch."""
    first, *words = shlex.split(command)
    how: dict[str, Any] = {"fork": "all", "first": partial(hide, hidden), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    if first == "paceline":
        return paceline(folder, *words, **how)
    if first == "python":
        return paceline(folder, program=tuple(words), TMPDIR=str(folder), **how)  # where torchrun leaves a folder
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)


def names_what_it_needs(page: Path, said: str) -> bool:
    """Return whether `said` is that a package is missing, which `page` says to install."""
    needed = MISSING.search(said)
    if needed is None:
        return False
    name = re.escape(f"'.[{needed[1]}]'" if needed[1] else needed[2])
    assert re.search(rf"pip install (-c constraints.txt )?(-e )?{name}", page.read_text("utf-8")), f"{page}: {said}"
    return True


@pytest.mark.slow
@pytest.mark.parametrize("page", WALKS, ids=[page.stem for page in WALKS])
def test_printed_commands_run_as_printed_from_a_base_install(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    prepare(folder)
    walk = WALKS[page]
    if page == CHECKPOINTS:  # whose commands show what its code has saved
        (folder / "blocks.py").write_text("\n".join(block["shown"] or block["hidden"] for block in blocks(page)))
        walk = ["paceline run --nproc 2 blocks.py", *walk]
    for command in walk:
        for word, example in STANDS_FOR.items():
            command = re.sub(rf"\b{word}\b", example, command)
        done = forked(command, folder, extras())
        if done.returncode and names_what_it_needs(page, done.stderr):
            done = forked(command, folder, [])
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


NAMED = sorted({row for page in PAGES for row in commands(page) if row.startswith("paceline") and reason(row)})


@pytest.mark.parametrize("command", NAMED)
def test_the_options_of_commands_that_are_not_run_exist(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    place = 3 if words[1] == "train" else 2
    # Options are parsed before the help is printed.
    assert run_here(monkeypatch, *words[1:place], "--help", *words[place:]) == 0
    assert "--help" in capsys.readouterr().out


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE))
        assert named <= targets, page
