"""Exit of a rank's process."""

from __future__ import annotations

from pathlib import Path

from processes import Running, script

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
