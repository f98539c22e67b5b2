"""What ranks print comes in whole lines, and neither holds them up nor ends them."""

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

from loops import loop
from processes import Running, paceline, script

PRINTS = """
import ctypes, os, subprocess, sys, threading
rank, libc = os.environ["RANK"], ctypes.CDLL(None)
def work(name):
    for number in range(100):
        print("rank", rank, name, number, "of", 100)
threads = [threading.Thread(target=work, args=(f"thread{each}",)) for each in range(2)]
for each in threads: each.start()
for each in threads: each.join()
for number in range(100):
    libc.printf(b"rank %s ", rank.encode())
    libc.printf(b"C %d of 100\\n", number)
    sys.stderr.write(f"rank {rank} error {number} of 100\\n")
    print(f"rank {rank} long", "x" * 50_000, "of 100")
subprocess.run(["sh", "-c", "for i in 1 2 3; do printf 'rank %s ' $RANK; printf 'child %s of 100\\n' $i; done"])
"""
KINDS = {"thread0": 100, "thread1": 100, "C": 100, "error": 100, "long": 100, "child": 3}


@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix"])
def test_every_line_is_whole_whatever_prints_it(tmp_path: Path, prefix: bool) -> None:
    # A third of the lines were broken: python -u writes each argument of print() by itself.
    options = ["--prefix-ranks"] if prefix else []
    done = paceline(tmp_path, "run", "--nproc", "4", *options, script(tmp_path, PRINTS), fork="all")
    assert done.returncode == 0
    line = re.compile((r"rank (\d) \| " if prefix else "()") + r"rank (\d) (\w+) (\d+|x{50000}) of 100")
    lines = [line.fullmatch(text) for text in done.stdout.splitlines()]
    lines += [line.fullmatch(text) for text in done.stderr.splitlines() if not text.startswith("note: ")]
    assert all(lines)
    assert Counter(match[3] for match in lines if match) == {kind: 4 * count for kind, count in KINDS.items()}
    assert all(match[1] == match[2] for match in lines if match and prefix)


def test_an_incomplete_last_line_and_its_bytes_are_kept(tmp_path: Path) -> None:
    done = paceline(
        tmp_path, "run", script(tmp_path, "print('10 %', end='\\r'); print('a\\n\\n b', end='')"), fork="all"
    )
    assert (tmp_path / "stdout").read_bytes() == b"10 %\ra\n\n b", done.stderr


def test_the_launchers_message_follows_what_the_ranks_printed(tmp_path: Path) -> None:
    text = "import os, sys\nsys.stderr.write('last words'); sys.stderr.flush(); os._exit(7)"
    done = paceline(tmp_path, "run", script(tmp_path, text), fork="all")
    assert done.stderr == "last words\nerror: rank 0 failed first (exit code 7) before its first step\n" or (
        done.stderr == "last words\nerror: rank 0 failed first (exit code 7)\n"
    )


STEPS = loop(
    6,
    'paceline.Checkpointer("saved", every=100)',
    before="""
open(f"from-{first_step}", "w").close()
print("step", step, "x" * 100_000)
print("step", step, file=sys.stderr)
""",
    after="if step == 3 and start == 0 and world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
)


def full_disk() -> None:
    for stream in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream)


def closed_terminal() -> None:
    terminal, stream = os.openpty()
    for number in (1, 2):
        os.dup2(stream, number)
    os.close(stream)
    os.close(terminal)


@pytest.mark.parametrize("streams", [full_disk, closed_terminal])
def test_ranks_that_print_every_step_train_on_though_nobody_can_read_it(
    tmp_path: Path, streams: Callable[[], None]
) -> None:
    done = paceline(tmp_path, "run", "--nproc", "2", script(tmp_path, STEPS), fork="all", first=streams)
    assert done.returncode == 0
    assert (tmp_path / "from-3").exists()


def blocked() -> None:
    reader, writer = os.pipe()
    os.dup2(reader, 99)  # open, and never read
    for stream in (1, 2):
        os.dup2(writer, stream)


@pytest.mark.slow
def test_ranks_are_not_held_up_by_a_reader_that_does_not_read_and_a_signal_is_obeyed(tmp_path: Path) -> None:
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


def as_on_a_terminal() -> None:
    """Become the child of a process that shows what comes from the child's terminal, and answers it."""
    pid, terminal = pty.fork()
    if pid == 0:
        return
    with suppress(OSError):  # the child has ended
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


def on_a_terminal(folder: Path, text: str, *options: str) -> tuple[int, str]:
    done = paceline(folder, "run", *options, script(folder, text), first=as_on_a_terminal)
    return done.returncode, done.stdout


def test_on_a_terminal_ranks_have_one_and_a_prompt_is_shown(tmp_path: Path) -> None:
    text = """
import os, sys
print(sys.stdout.isatty(), os.environ["RANK"])
if os.environ["RANK"] == "1": print(input("(ask)"))
"""
    code, said = on_a_terminal(tmp_path, text, "--nproc", "2")
    assert code == 0
    assert {"True 0", "True 1", "an answer"} <= set(said.splitlines())


def test_the_rest_of_a_line_that_another_rank_interrupted_begins_with_the_rank(tmp_path: Path) -> None:
    text = """
import os, sys, time
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
if os.environ["RANK"] == "0":
    print("half", end="", flush=True)
    wait_for("whole.shown")
    print("rest")
else:
    wait_for("half.shown")  # an incomplete line is held back for a while
    print("whole", flush=True)
"""
    code, said = on_a_terminal(tmp_path, text, "--nproc", "2", "--prefix-ranks")
    assert (code, said.splitlines()) == (0, ["rank 0 | half", "rank 1 | whole", "rank 0 | rest"])


def test_after_ctrl_c_the_launcher_begins_a_new_line_behind_a_progress_bar(tmp_path: Path) -> None:
    text = "import time; print('\\r 50 % (stop)', end='', flush=True); time.sleep(60)"
    code, said = on_a_terminal(tmp_path, text)
    assert code == 130
    assert said.splitlines()[-1] == "interrupted"
