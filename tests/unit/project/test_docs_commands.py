"""The commands that README and docs print run as printed, in an environment without the extras.

Each page is a walk: its ``python`` blocks, as one script on two ranks, then its indented command lines, in one folder.
What stands for the reader's own files (``script.py``, ``MODEL``) is put there. What only an extra brings cannot be
imported; what needs one must say so, its page must name what to install, and then it runs with it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_docs import PAGES, ROOT, blocks

from processes import paceline

LINE = re.compile(r"^    ((?:paceline|make|python|torchrun|pip|cp|[A-Z_]+=\S+) .*?)(?: {2,}.*)?$", re.MULTILINE)
NOT_RUN = {
    r"make ": "CI runs the targets themselves",
    r"pip install ": "it is pip's",
    r"NODE_RANK=": "two hosts: test_examples.py has two launchers",
    r".*--nproc gpu": "needs GPUs",
    r".*gpu_check.py": "test_gpu_check.py runs it",
    r".*pytest tests/buggy": "test_testing.py runs it",
    r"paceline top": "shows a job that runs: test_top.py",
    r"paceline train mrpc --nproc 2( --bf16.*| --balance)?$": "fetches from the hub: test_mrpc_cli.py",
    r"paceline train (mrpc|lm) .*": "takes minutes: the recipes' own tests run them, shorter",
    r"paceline estimate-memory HuggingFaceTB": "fetches from the hub: test_memory_estimate.py",
    r"paceline profile (--compare|report)": "needs files of earlier runs: test_profiler_programs.py",
    r"paceline bench collectives": "takes a minute: test_bench.py",
    r"paceline compare ": "takes a minute: test_compare.py",
    r".*batch_sweep.py": "needs MNIST's files: test_batch_sweep.py",
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


def without_extras(folder: Path) -> str:
    """Write a module that hides what only extras bring from each interpreter that starts; returns its folder."""
    named = packages_distributions()
    hidden = sorted(
        name
        for name, owners in named.items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in base_distributions() for owner in owners)
    )
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        f"HIDDEN = frozenset({hidden})\n"
        "class BaseFinder(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name in HIDDEN else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [BaseFinder if finder is PathFinder else finder for finder in sys.meta_path]\n"
    )
    return str(folder)


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "PET_"))}
    clean |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", **environment}
    return subprocess.run(command, shell=True, cwd=folder, env=clean, capture_output=True, text=True, timeout=300)


def prepare(folder: Path) -> None:
    """Put what a page takes for granted into `folder`: the clone's programs, and the reader's script."""
    for name in ("examples", "benchmarks", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    [first, *_] = blocks(ROOT / "README.md")
    for name in ("script.py", "train.py"):
        (folder / name).write_text(first["shown"])
    (folder / "model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(8, 8)\n")


FIRST = {row: page for page in reversed(PAGES) for row in commands(page) if not reason(row)}
"""The page for which a command is run, though others print it, too."""
WALKS = {page: [row for row in commands(page) if FIRST.get(row) == page] for page in PAGES}
WALKED = [page for page in PAGES if blocks(page) or WALKS[page]]


@pytest.mark.slow
@pytest.mark.parametrize("page", WALKED, ids=[page.stem for page in WALKED])
def test_printed_commands_run_as_printed_from_a_base_install(page: Path, tmp_path: Path) -> None:
    folder, hiding = tmp_path / "walk", tmp_path / "hiding"
    folder.mkdir()
    hiding.mkdir()
    prepare(folder)
    base = without_extras(hiding)
    source = page.read_text("utf-8")
    (folder / "blocks.py").write_text("\n".join(block["shown"] or block["hidden"] or "" for block in blocks(page)))
    script = ["paceline run --nproc 2 --max-restarts 0 blocks.py"] if blocks(page) else []
    for command in [*script, *WALKS[page]]:
        for word, example in STANDS_FOR.items():
            command = re.sub(rf"\b{word}\b", example, command)
        done = shell(command, folder, PYTHONPATH=base)
        if done.returncode and (needed := MISSING.search(done.stderr)):
            name = re.escape(f"'.[{needed[1]}]'" if needed[1] else needed[2])
            assert re.search(rf"pip install (-c constraints.txt )?(-e )?{name}", source), f"{command} needs {name}"
            done = shell(command, folder)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


NAMED = sorted({row for page in PAGES for row in commands(page) if row.startswith("paceline") and reason(row)})


@pytest.mark.parametrize("command", NAMED)
def test_the_options_of_commands_that_are_not_run_exist(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    place = 3 if words[1] == "train" else 2
    # Options are parsed before the help is printed.
    done = paceline(tmp_path, *words[1:place], "--help", *words[place:], NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        named = set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE))
        assert named <= targets, page
