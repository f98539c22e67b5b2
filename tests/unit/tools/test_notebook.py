"""Notebook ranks without a kernel: the text of cells, the connection to a rank, and folding of output."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from insides import (
    PATIENCE_S,
    Channel,
    Conversation,
    Folding,
    Process,
    Processes,
    Rank,
    RankMagics,
    Start,
    Wait,
    fork_client,
    parsed_start,
    pulled,
    ranks_in,
    routed,
    wait_in,
)
from paceline import World, errors
from paceline.errors import PacelineError, UsageError
from twins import Pools


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


def test_line_magics_of_the_extension_run_in_the_kernel() -> None:
    kind: Any = RankMagics
    for name in kind.magics["line"]:
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


# -- interrupts on the connection between a rank and the kernel --------------------------------------------------------


def interrupted_in_a_message(world: World) -> list[tuple[str, int]]:
    """Interrupt this rank, which is a separate process, while it sends a message; return the received messages."""
    kernel, rank = Pipe()
    channel = Channel(rank)
    serving = Rank(channel, None, is_busy=True)  # type: ignore[arg-type]
    received = []
    size = 4_000_000  # exceeds the capacity of the pipe, so that sending blocks

    def read() -> None:
        while not channel.in_message:
            pass
        signal.raise_signal(signal.SIGINT)
        received.append(kernel.recv())

    previous = signal.signal(signal.SIGINT, serving.interrupt)  # restored because the rank also runs other tests
    try:
        reader = threading.Thread(target=read)
        reader.start()
        with pytest.raises(KeyboardInterrupt):
            channel.send("display", b"x" * size)
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, previous)
    return [(kind, len(content)) for kind, content in received]


def test_interrupt_does_not_split_a_message(pools: Pools) -> None:
    assert pools.run(1, interrupted_in_a_message) == [[("display", 4_000_000)]]


# -- folding: equal lines of several ranks appear once, and the others in order ----------------------------------------


def folded(*printed: str, ended: bool = True) -> str:
    """Return the output for ranks that print these words simultaneously."""
    folding = Folding(list(range(len(printed))))
    for rank, words in enumerate(printed):
        for word in words.split():
            folding.add(rank, word, 0.0)
        if ended:
            folding.end(rank)
    return " ".join(f"{word}:{''.join(map(str, ranks))}" for word, ranks in folding.ready(0.0))


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (("a b", "a b"), "a:01 b:01"),
        (("x0 same", "x1 same"), "x0:0 x1:1 same:01"),
        (("extra a b", "a b"), "extra:0 a:01 b:01"),
        (("a b", "extra a b"), "extra:1 a:01 b:01"),
        (("a b", "b a"), "a:0 b:01 a:1"),
        (("a", ""), "a:0"),
        (("", "a"), "a:1"),
        (("a c", "a c", "b c"), "a:01 b:2 c:012"),
        (("a a a", "a"), "a:01 a:0 a:0"),
    ],
)
def test_equal_lines_are_shown_once(printed: tuple[str, ...], expected: str) -> None:
    assert folded(*printed) == expected


def test_line_waits_briefly_for_the_other_ranks() -> None:
    folding = Folding([0, 1])
    folding.add(0, "a", 10.0)
    assert list(folding.ready(10.1)) == []
    assert list(folding.ready(10.0 + PATIENCE_S)) == [("a", [0])]
    folding.add(0, "b", 20.0)
    folding.end(1)  # no more output can follow
    assert list(folding.ready(20.0)) == [("b", [0])]


STDLIB, OURS = sysconfig.get_path("stdlib"), Path(errors.__file__).parent
ALL_REDUCE = f"""Thread 0x1 (most recent call first):
  File "/x/threading.py", line 1 in run

Current thread 0x2 (most recent call first):
  File "{STDLIB}/selectors.py", line 9 in select
  File "{OURS}/comm/doorbells.py", line 75 in sleep
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "<ipython-input-4-abc>", line 6 in __init__
  File "<ipython-input-7-def>", line 1 in <module>
  File "/v/lib/python3.11/site-packages/IPython/core/interactiveshell.py", line 3699 in run_code
"""
BACKWARD = """Current thread 0x2 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "<ipython-input-7-def>", line 3 in <module>
"""
FINISHES = BACKWARD.replace(  # inside the wrapper, outside any Python collective
    "first):\n", f'first):\n  File "{OURS}/ddp/finisher.py", line 154 in wait\n'
)
SLEEP = """Current thread 0x2 (most recent call first):
  File "<ipython-input-7-def>", line 3 in <module>
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
"""


def test_stack_shows_the_call_and_cell_in_which_a_rank_waits() -> None:
    assert wait_in(ALL_REDUCE) == Wait("all_reduce", "In[4], line 6")
    assert str(wait_in(ALL_REDUCE)) == "all_reduce() (In[4], line 6)"
    assert wait_in(BACKWARD) == Wait("backward", "In[7], line 3", is_sure=False)  # it could also be computing
    assert wait_in(FINISHES) == Wait("backward", "In[7], line 3", is_sure=False)
    assert wait_in(SLEEP) is None
    assert wait_in("") is None
