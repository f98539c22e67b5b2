"""Output of ranks arrives in whole lines, and never blocks or ends a rank."""

from __future__ import annotations

import os
import pty
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from insides import output
from loops import loop
from processes import Running, paceline, script

PRINTS = """
import ctypes, os, subprocess, sys, threading
rank, libc = os.environ["RANK"], ctypes.CDLL(None)
def work(name):
    for number in range(100):
        print("rank", rank, name, number, "of", 100)
threads = [threading.Thread(target=work, args=(f"thread{index}",)) for index in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for number in range(100):
    libc.printf(b"rank %s ", rank.encode())
    libc.printf(b"C %d of 100\\n", number)
    sys.stderr.write(f"rank {rank} error {number} of 100\\n")
    print(f"rank {rank} long", "x" * 50_000, "of 100")
subprocess.run(["sh", "-c", "for i in 1 2 3; do printf 'rank %s ' $RANK; printf 'child %s of 100\\n' $i; done"])
"""
KINDS = {"thread0": 100, "thread1": 100, "C": 100, "error": 100, "long": 100, "child": 3}


def test_lines_are_never_broken(tmp_path: Path) -> None:
    # A third of the lines were broken: python -u writes each argument of print() separately.
    done = paceline(tmp_path, "run", "--nproc", "4", "--prefix-ranks", script(tmp_path, PRINTS), fork="all")
    assert done.returncode == 0
    line = re.compile(r"rank (\d) \| rank (\d) (\w+) (\d+|x{50000}) of 100")
    lines = [line.fullmatch(text) for text in done.stdout.splitlines()]
    lines += [line.fullmatch(text) for text in done.stderr.splitlines() if not text.startswith("note: ")]
    assert all(lines)
    assert Counter(match[3] for match in lines if match) == {kind: 4 * count for kind, count in KINDS.items()}
    assert all(match[1] == match[2] for match in lines if match)


def test_incomplete_last_line_is_kept_before_the_launcher_message(tmp_path: Path) -> None:
    text = """
import os, sys
print('10 %', end='\\r'); print('a\\n\\n b', end='')
sys.stdout.flush(); sys.stderr.write('last words'); sys.stderr.flush(); os._exit(7)
"""
    done = paceline(tmp_path, "run", script(tmp_path, text), fork="all")
    assert (tmp_path / "stdout").read_bytes() == b"10 %\ra\n\n b"
    last = "last words\nerror: rank 0 failed first (exit code 7)"
    assert done.stderr in (f"{last}\n", f"{last} before its first step\n")


STEPS = loop(
    6,
    'paceline.Checkpointer("saved", every=100)',
    before="""
open(f"from-{first_step}", "w").close()
print("step", step, "x" * 100_000)
print("step", step, file=sys.stderr)
""",
    after="""
if step == 3 and start == 0 and world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if step == 5:
    open(f"ready-{world.rank}", "w").close()
    while not checkpointer._recovery.boundary.requests: time.sleep(0.01)
""",
)


def full_disk_and_closed_terminal() -> None:
    terminal, stream = os.openpty()
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(stream, 2)
    os.close(stream)
    os.close(terminal)


def closed_pipe_and_full_disk() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


@pytest.mark.parametrize("streams", [full_disk_and_closed_terminal, closed_pipe_and_full_disk])
def test_training_and_signals_survive_unwritable_output(tmp_path: Path, streams: Callable[[], None]) -> None:
    # With three ranks, a machine with two cores also prints a note before the start.
    with Running(tmp_path, "run", "--nproc", "3", script(tmp_path, STEPS), fork="all", first=streams) as job:
        job.wait_for("ready-0", "ready-1", "ready-2")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "from-3").exists()
    assert (tmp_path / "saved" / "step-00000006").exists()


def blocked() -> None:
    reader, writer = os.pipe()
    os.dup2(reader, 99)  # open, but never read
    for stream in (1, 2):
        os.dup2(writer, stream)


@pytest.mark.slow
def test_stalled_reader_blocks_neither_ranks_nor_signals(tmp_path: Path) -> None:
    text = """
import os, sys, time
for _ in range(160): print("x" * 100_000)
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(120)
"""
    with Running(tmp_path, "run", "--nproc", "2", script(tmp_path, text), fork="all", first=blocked) as job:
        job.wait_for("ready-0", "ready-1")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM


def blocked_for_half_a_second() -> None:
    blocked()
    output.STUCK_S = output.AT_END_S = 0.5


@pytest.mark.parametrize("options", [(), ("--tee", "3")])
@pytest.mark.parametrize("code", [0, 7])
def test_job_code_is_returned_despite_unread_output(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    text = f"import sys\nfor _ in range(160): print('x' * 100_000)\nsys.exit({code})"
    arguments = ("run", *options, script(tmp_path, text))
    done = paceline(tmp_path, *arguments, fork="all", first=blocked_for_half_a_second)
    assert done.returncode == (1 if code else 0)


def as_on_a_terminal() -> None:
    """Run in a child whose parent displays the terminal output and answers prompts."""
    pid, terminal = pty.fork()
    if pid == 0:
        return
    with suppress(OSError):  # the child has exited
        while more := os.read(terminal, 4096):
            os.write(1, more)
            for word in ("half", "whole"):
                if word.encode() in more:
                    Path(f"{word}.shown").touch()
            if b"(ask)" in more:
                os.write(terminal, b"an answer\n")
            if b"(stop)" in more:
                os.write(terminal, b"\x03")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


ON_A_TERMINAL = """
import os, sys, time
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
if os.environ["RANK"] == "0":
    print("terminal", sys.stdout.isatty())
    print(input("(ask)"))
    print("half", end="", flush=True)
    wait_for("whole.shown")
    print("rest")
    print("\\r 50 % (stop)", end="", flush=True)
else:
    wait_for("half.shown")  # an incomplete line is held back for a while
    print("whole", flush=True)
time.sleep(60)
"""


def test_terminal_output_has_prompts_rank_prefixes_and_a_newline_on_ctrl_c(tmp_path: Path) -> None:
    arguments = ("run", "--nproc", "2", "--prefix-ranks", script(tmp_path, ON_A_TERMINAL))
    done = paceline(tmp_path, *arguments, first=as_on_a_terminal)
    lines = done.stdout.splitlines()
    assert done.returncode == 130, lines
    assert "rank 0 | terminal True" in lines
    assert "an answer" in lines
    # A line interrupted by another rank continues after its rank prefix.
    at = lines.index("rank 0 | half")
    assert lines[at + 1 : at + 3] == ["rank 1 | whole", "rank 0 | rest"]
    assert lines[-1] == "interrupted"
