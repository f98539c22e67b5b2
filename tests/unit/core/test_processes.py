"""Processes and their stacks: status from /proc, the end of a rank, and the user's line in errors and warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline
from insides import busy_seconds, place_in, processor_seconds
from paceline.errors import UsageError
from processes import Running, script
from processes import paceline as run

SPIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
DELAY_S = 0.1


def test_a_process_waiting_for_a_core_is_busy_and_a_sleeping_one_is_not() -> None:
    """A notebook killed a low-priority rank because it got hardly any CPU time."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    try:
        assert sleeping.stdout is not None
        sleeping.stdout.readline()
        began = time.monotonic(), busy_seconds(sleeping.pid)
        while any(busy_seconds(process.pid) - processor_seconds(process.pid) < DELAY_S for process in spinning):
            assert time.monotonic() < began[0] + 60
            time.sleep(0.01)
        assert 0 <= busy_seconds(sleeping.pid) - began[1] < DELAY_S
    finally:
        for process in (*spinning, sleeping):
            process.kill()
            process.communicate()
    assert busy_seconds(sleeping.pid) == float("inf")
    assert busy_seconds(os.getpid()) < float("inf")


BUSY = """
import hashlib, threading, paceline
paceline.init()
data, began = bytes(2**28), threading.Event()

def work():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write("pt_gloo_runloop")
    began.set()
    hashlib.sha256(data)  # without the GIL
    open("done", "w").close()
    threading.Event().wait()

threading.Thread(target=work, daemon=True).start()
began.wait()
"""


def test_the_interpreter_exits_after_gloo_threads_released_their_tensors(tmp_path: Path) -> None:
    """A Gloo thread that released a tensor later aborted the rank after a successful training."""
    with Running(tmp_path, program=(script(tmp_path, BUSY),)) as job:
        assert job.wait() == 0, job.stderr
    assert (tmp_path / "done").exists()


HAMMER = """
import gc, random, sys, threading, time
from paceline.profiler.stack_samples import function_of
from paceline.core.stacks import readable_stacks

main, looks = threading.get_ident(), 0

def called(phase, info):
    if threading.current_thread() is reader:
        time.sleep(1e-5)  # the other thread runs

def read():
    global looks
    for looks in range(2_500):
        with readable_stacks():
            function_of(sys._current_frames().get(main))

functions = []
for size in range(0, 60, 3):  # frames of different sizes take each other's place
    body = "; ".join(f"v{number} = [{number}]" for number in range(size)) or "pass"
    code = f"def f(depth):\\n  {body}\\n  if depth:\\n    return functions[random.randrange(20)](depth - 1)"
    exec(compile(code, sys.base_prefix + "/lib/made.py", "exec"))
    functions.append(f)
reader = threading.Thread(target=read)
gc.callbacks.append(called)
gc.set_threshold(5)
sys.setswitchinterval(1e-6)
reader.start()
while reader.is_alive():
    functions[random.randrange(20)](random.randrange(12))
print(looks)
"""


def test_a_running_threads_stack_is_readable_during_garbage_collection(tmp_path: Path) -> None:
    # Python 3.11 without the pause: AttributeError or SIGSEGV within 2,000 reads.
    done = run(tmp_path, program=("-c", HAMMER), fork="all")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2499", "")


SOURCE = Path(paceline.__file__).parent
MISTAKES = {
    "a method that all ranks call": "checkpointer.save(-1)  # here",
    "in a function": "def work():\n    checkpointer.restore(only=['nothing'])  # here\nwork()",
    "in a with block": "with checkpointer:\n    checkpointer.save(-1)  # here",
    "through autograd": (
        "ddp = paceline.DistributedDataParallel(torch.nn.Linear(2, 2), unused_parameters='error')\n"
        "ddp(torch.ones(1, 2)).sum().backward()\n"
        "ddp.module.bias * 1\n"
        "(ddp(torch.ones(1, 2)) * 0 + ddp.module.weight.sum()).sum().backward(); checkpointer.save(-1)  # here"
    ),
}
BEGIN = """
import torch, paceline
paceline.init()
checkpointer = paceline.Checkpointer("saved")
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here"))


@pytest.mark.ranks(1)
def test_a_mistake_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Errors in collective methods named contextlib.py, line 81.
    for name, code in MISTAKES.items():
        (folder := tmp_path / name).mkdir()
        monkeypatch.chdir(folder)
        text = BEGIN + code
        with pytest.raises(UsageError) as mistake:
            exec(compile(text, "/home/me/script.py", "exec"), {})
        assert place_in(mistake.tb) == f" (/home/me/script.py, line {line_of(text)})"


def test_code_without_a_file_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, program=("-c", BEGIN + "checkpointer.save(-1)  # here"), fork="all")
    assert done.stderr.splitlines()[-1].endswith("(<string>, line 5)")


def test_a_warning_names_the_users_line(tmp_path: Path) -> None:
    text = BEGIN + (
        "import os\nos.mkdir('saved/step-00000001')\ndef work():\n    checkpointer.latest()  # here\nwork()\n"
        "import threading"
    )
    done = run(tmp_path, "run", script(tmp_path, text), fork="all")
    assert done.returncode == 0, done.stderr
    assert f"script.py:{line_of(text)}: CheckpointWarning: the checkpoint " in done.stderr


def test_no_warning_counts_frames() -> None:
    # A fixed number of frames is wrong as soon as a decorator or helper is added.
    assert not [path.name for path in SOURCE.rglob("*.py") if re.search(r"stacklevel=", path.read_text())]
