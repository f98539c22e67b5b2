"""The text of cells: which code goes to the ranks, and how magics parse their arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.launch import fork_client
from paceline.tools.notebook.cell_parser import Start, parsed_start, pulled, ranks_in, routed
from paceline.tools.notebook.execution import Conversation, Shown
from paceline.tools.notebook.magics import RankMagics
from paceline.tools.notebook.processes import Process, Processes


def run_all(text: str) -> str:
    return f"get_ipython().run_cell_magic('rank', 'all', {text!r})\n"


def line_magic(name: str, argument: str = "") -> str:
    return f"get_ipython().run_line_magic({name!r}, {argument!r})\n"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("x = 1\nx", run_all("x = 1\nx")),
        ("\n# only a remark\n", ""),
        ("%%rank [0]\nx", "%%rank [0]\nx"),
        ("%%local\nx = 1\nx", "x = 1\nx"),
        ("%%time\nx", run_all("%%time\nx")),
        ("%time x", run_all("%time x")),
        ("%sync", line_magic("sync")),
        ("%pull loss from 1", line_magic("pull", "loss from 1")),
        ("x = 1\n%pull x from 1\ny = 2\n", run_all("x = 1\n") + line_magic("pull", "x from 1") + run_all("y = 2\n")),
        ("text = '''\n  %sync\n'''", run_all("text = '''\n  %sync\n'''")),
        ("%dist_init --nproc 2\nx = 1", line_magic("dist_init", "--nproc 2") + run_all("x = 1")),
        ("%pip install something", line_magic("pip", "install something")),
        ("%load_ext paceline", line_magic("load_ext", "paceline")),
        ("%synchronous = 1", run_all("%synchronous = 1")),
        ("%%distributed\nx", run_all("x")),
        ("%%rank[0,1]\nx = '%%rank['", "%%rank [0,1]\nx = '%%rank['"),
    ],
)
def test_cells_run_on_the_ranks_except_kernel_commands(cell: str, expected: str) -> None:
    lines = cell.splitlines(keepends=True)
    result = "".join(routed(lines, has_ranks=True))
    assert result == expected or (not expected and not result.strip().replace("# only a remark", ""))


@pytest.mark.parametrize("cell", ["%matplotlib inline", "%cd ..\n!ls\n", "# a remark\n%env A=1"])
def test_commands_run_in_the_kernel_until_ranks_start(cell: str) -> None:
    # Notebooks often begin with such commands, which are meant for the kernel.
    lines = cell.splitlines(keepends=True)
    assert routed(lines, has_ranks=False) == lines
    assert "run_cell_magic" in "".join(routed(lines, has_ranks=True))


@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize(
    ("line", "name", "remedy"),
    [
        ("%load_ext nbdistributed", "load_ext nbdistributed", "use %load_ext paceline"),
        ("%dist_mode -d", "dist_mode", "use %%local"),
        ("%dist_reset", "dist_reset", "use %dist_shutdown and %dist_init"),
    ],
)
def test_nbdistributed_magics_are_refused_with_their_replacement(
    line: str, name: str, remedy: str, has_ranks: bool
) -> None:
    assert "".join(routed([line], has_ranks)) == line_magic("dist_instead", name)
    magics: Any = RankMagics(None)
    with pytest.raises(Shown, match=rf"^UsageError: %{name} belongs to .*{remedy}"):
        magics.dist_instead(name)


def test_line_magics_of_the_extension_run_in_the_kernel() -> None:
    kind: Any = RankMagics
    for name in kind.magics["line"].keys() - {"dist_instead"}:
        assert routed([f"%{name}"], has_ranks=True) == [line_magic(name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", [0, 1, 2]), ("[0]", [0]), ("[0,2]", [0, 2]), ("[2, 0]", [0, 2]), ("1", [1]), ("0 2", [0, 2])],
)
def test_rank_lists_are_parsed(text: str, expected: list[int]) -> None:
    assert ranks_in(text, 3) == expected


@pytest.mark.parametrize("text", ["[7]", "[0,3]", "", "[]", "[a]", "[-1]", "[0.5]", "zero"])
def test_nonexistent_ranks_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^%%rank .*(does not exist|names no ranks)") as caught:
        ranks_in(text, 3)
    assert "\n" not in str(caught.value)


def test_pull_parses_variables_and_a_rank() -> None:
    assert pulled("loss from 1", 2) == (["loss"], 1)
    assert pulled("loss, step from [0]", 2) == (["loss", "step"], 0)
    assert pulled("loss", 2) == (["loss"], None)
    for wrong in ("", "loss from 2", "loss from", "2x from 0", "loss from one", "from 1", "a b from 0"):
        with pytest.raises(UsageError, match=r"^%pull "):
            pulled(wrong, 2)


def test_start_options_take_values() -> None:
    assert parsed_start("--nproc 2") == parsed_start("-n 2") == parsed_start("--nproc=2") == Start(2)
    assert parsed_start("--num-processes 2 -t 60") == Start(2, timeout="60")
    everything = "--nproc 2 --backend gloo --timeout 60"
    assert parsed_start(everything) == Start(2, "gloo", "60")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs the number of ranks"),
        ("--nproc", "expected one argument"),
        ("--nproc 2 --layers 3", "unrecognized arguments: --layers 3; it takes --nproc, --backend"),
        ("--nproc 2 --gpu-ids 2,3", "to choose GPUs, run %env CUDA_VISIBLE_DEVICES=2,3 in an earlier cell"),
        ("2", "unrecognized arguments: 2"),
        ("--nproc '2", "No closing quotation"),
    ],
)
def test_invalid_start_arguments_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed_start(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kernel_does_not_wait_for_endless_output() -> None:
    process: Any = Process(None, os.open("/dev/zero", os.O_RDONLY), Pipe()[0])  # type: ignore[arg-type]
    assert len(process.read()) >= 65536
    process.close()


@pytest.fixture
def unforked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """The processes of a single-rank notebook that uses no fork server."""
    monkeypatch.setenv(fork_client.SETTING, "0")
    processes = Processes(Start(1))
    yield processes
    processes.close()


@pytest.mark.slow
def test_rank_without_a_fork_server_runs_cells_and_its_death_is_noticed(unforked: Processes) -> None:
    unforked.spawn([0])
    assert isinstance(unforked.ranks[0].process, subprocess.Popen)
    look = Conversation(unforked, [0]).hold("run", "import os\nassert os.readlink('/dev/fd/0') == '/dev/null'", 1)
    assert (look.failures, look.deaths) == ({}, {})
    death = Conversation(unforked, [0]).hold("run", "os.kill(os.getpid(), 9)", 2)
    assert death.deaths[0].startswith("signal SIGKILL")


def test_rank_that_exits_during_startup_is_an_error_with_its_output(unforked: Processes, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('no torch here')")
    unforked._environments[0]["PYTHONPATH"] = str(tmp_path)
    with pytest.raises(PacelineError, match=r"rank 0 exited while starting \(exit code 1\): no torch here"):
        unforked.spawn([0])
