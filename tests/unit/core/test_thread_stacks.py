"""The stack of another thread is readable while that thread runs and the garbage collector is invoked."""

from __future__ import annotations

from pathlib import Path

from processes import paceline

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
    done = paceline(tmp_path, program=("-c", HAMMER), fork="all")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2499", "")
