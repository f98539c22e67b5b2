"""Jupyter kernels for tests: cells run in a real one, and what each shows."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

from processes import until

TIMEOUT_S = 100
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Kernel:
    """A running kernel; :meth:`run` is a cell."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, text: str, interrupt_when: Callable[[], bool] | None = None) -> Cell:
        """Run `text` as a cell; press the button that interrupts it as soon as `interrupt_when()`."""
        notebook = self._client.nb
        notebook.cells.append(nbformat.v4.new_code_cell(text))
        cell = notebook.cells[-1]
        if interrupt_when is not None:
            threading.Thread(target=_interrupt, args=(self._client.km.provisioner.pid, interrupt_when)).start()
        self._client.execute_cell(cell, len(notebook.cells) - 1)
        return Cell(cell)

    def restart(self) -> None:
        """Restart the kernel at once, as the button does."""
        run_sync(self._client.km.restart_kernel)(now=True)
        run_sync(self._client.kc.wait_for_ready)()


def _interrupt(pid: int, when: Callable[[], bool]) -> None:
    until(when)
    os.kill(pid, signal.SIGINT)


class Cell:
    """What a cell shows."""

    def __init__(self, cell: Any) -> None:
        outputs = cell.outputs
        self.text = "".join(each.text for each in outputs if each.output_type == "stream")
        """All that it printed."""
        self.lines = self.text.splitlines()
        self.error = "\n".join(_COLOURS.sub("", line) for each in outputs for line in each.get("traceback", ()))
        """The lines of the error; empty if there is none."""
        self.error_name = next((each.ename for each in outputs if each.output_type == "error"), "")
        self.pictures = sum("image/png" in each.get("data", {}) for each in outputs)
        self.values = [each.data.get("text/plain") for each in outputs if each.output_type == "execute_result"]


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """A kernel that works in `folder`."""
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=TIMEOUT_S,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel():
        yield Kernel(client)
