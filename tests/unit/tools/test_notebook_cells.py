"""The text of cells: what goes to the ranks, and what the magics' arguments mean."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.launch import host_limits
from paceline.tools.notebook.cell_parser import Start, parsed_start, pulled, ranks_in, routed
from paceline.tools.notebook.kernel import processes as kernel_processes
from paceline.tools.notebook.kernel.errors import Shown
from paceline.tools.notebook.kernel.processes import Process, Processes
from paceline.tools.notebook.magics import RankMagics


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
def test_a_cell_goes_to_the_ranks_except_what_is_the_kernels(cell: str, expected: str) -> None:
    lines = cell.splitlines(keepends=True)
    result = "".join(routed(lines, has_ranks=True))
    assert result == expected or (not expected and not result.strip().replace("# only a remark", ""))


@pytest.mark.parametrize("cell", ["%matplotlib inline", "%cd ..\n!ls\n", "# a remark\n%env A=1"])
def test_commands_are_the_kernels_as_long_as_there_are_no_ranks(cell: str) -> None:
    # A notebook often begins with them, and they mean the kernel.
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
def test_a_magic_of_nbdistributed_is_refused_with_the_one_to_use(
    line: str, name: str, remedy: str, has_ranks: bool
) -> None:
    assert "".join(routed([line], has_ranks)) == line_magic("dist_instead", name)
    magics: Any = RankMagics(None)
    with pytest.raises(Shown, match=rf"^UsageError: %{name} belongs to .*{remedy}"):
        magics.dist_instead(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", [0, 1, 2]), ("[0]", [0]), ("[0,2]", [0, 2]), ("[2, 0]", [0, 2]), ("1", [1]), ("0 2", [0, 2])],
)
def test_ranks_are_named_in_a_list(text: str, expected: list[int]) -> None:
    assert ranks_in(text, 3) == expected


@pytest.mark.parametrize("text", ["[7]", "[0,3]", "", "[]", "[a]", "[-1]", "[0.5]", "zero"])
def test_ranks_that_are_not_there_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^%%rank .*(does not exist|names no ranks)") as caught:
        ranks_in(text, 3)
    assert "\n" not in str(caught.value)


def test_pull_names_variables_and_a_rank() -> None:
    assert pulled("loss from 1", 2) == (["loss"], 1)
    assert pulled("loss, step from [0]", 2) == (["loss", "step"], 0)
    assert pulled("loss", 2) == (["loss"], None)
    for wrong in ("", "loss from 2", "loss from", "2x from 0", "loss from one", "from 1", "a b from 0"):
        with pytest.raises(UsageError, match=r"^%pull "):
            pulled(wrong, 2)


def test_a_start_has_options_with_values() -> None:
    assert parsed_start("--nproc 2") == parsed_start("-n 2") == parsed_start("--nproc=2") == Start(2)
    assert parsed_start("--num-processes 2 --gpu-ids 3,4") == Start(2, gpu_ids=(3, 4))
    assert parsed_start("-n 2 -g 3,4 -t 60") == Start(2, None, (3, 4), "60")
    assert parsed_start("--gpu-ids 3,4") == Start(2, gpu_ids=(3, 4))
    everything = "--nproc 2 --backend gloo --timeout 60"
    assert parsed_start(everything) == Start(2, "gloo", None, "60")


def test_ranks_that_memory_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "available_memory", lambda: host_limits.RANK_BYTES)
    with pytest.raises(UsageError, match=r"--nproc=2: the ranks need at least .* start fewer"):
        Processes(Start(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs the number of ranks"),
        ("--nproc", "expected one argument"),
        ("--nproc 2 --layers 3", "unrecognized arguments: --layers 3; it takes --nproc, --backend"),
        ("--nproc 2 --gpu-ids 0", "names 1 GPUs for 2 ranks"),
        ("--nproc 2 --gpu-ids 0,0", "not a list of different GPUs"),
        ("2", "unrecognized arguments: 2"),
        ("--nproc '2", "No closing quotation"),
    ],
)
def test_a_start_that_means_nothing_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed_start(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rank_that_prints_without_end_does_not_keep_the_kernel() -> None:
    process: Any = Process(process=None, output=os.open("/dev/zero", os.O_RDONLY))  # type: ignore[arg-type]
    assert len(process.read()) >= 65536
    process.close()


class Listening(Processes):
    """Processes of which rank 0 is started, and has not connected yet."""

    def __init__(self) -> None:
        self._listener, self._address = kernel_processes._listen()
        self._word = "secret"
        self.ranks = {0: Process(process=None, output=-1)}  # type: ignore[arg-type]

    def accepts(self, first: bytes) -> bool:
        """Whether a connection that begins with these bytes is taken for rank 0's."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(self._address)
            Connection(os.dup(client.fileno())).send_bytes(first)
            self._accept([0])
        connection, self.ranks[0].connection = self.ranks[0].connection, None
        if connection is not None:
            connection.close()
        return connection is not None


def test_only_a_rank_of_this_notebook_and_user_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Listening()
    assert processes.accepts(b"secret 0")
    for other in (b"wrong 0", b"secret 1", b"secret", b"", "é 0".encode(), b"\xff 0"):
        assert not processes.accepts(other)
    monkeypatch.setattr(kernel_processes, "credentials", lambda link: (1, os.geteuid() + 1, 1))
    assert not processes.accepts(b"secret 0")
    processes._listener.close()
