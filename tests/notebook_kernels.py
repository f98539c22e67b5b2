"""Real Jupyter kernels for tests: run cells and inspect their output."""

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
    """A running kernel; :meth:`run` executes a cell."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, text: str, interrupt_when: Callable[[], bool] | None = None) -> Cell:
        """Run `text` as a cell; interrupt it as soon as `interrupt_when()` returns true."""
        notebook = self._client.nb
        notebook.cells.append(nbformat.v4.new_code_cell(text))
        cell = notebook.cells[-1]
        if interrupt_when is not None:
            threading.Thread(target=_interrupt, args=(self._client.km.provisioner.pid, interrupt_when)).start()
        self._client.execute_cell(cell, len(notebook.cells) - 1)
        return Cell(cell)

    def restart(self) -> None:
        """Restart the kernel immediately, like the button in Jupyter."""
        run_sync(self._client.km.restart_kernel)(now=True)
        run_sync(self._client.kc.wait_for_ready)()


def _interrupt(pid: int, when: Callable[[], bool]) -> None:
    until(when)
    os.kill(pid, signal.SIGINT)


class Cell:
    """The output of a cell."""

    def __init__(self, cell: Any) -> None:
        outputs = cell.outputs
        self.text = "".join(output.text for output in outputs if output.output_type == "stream")
        """Everything the cell printed."""
        self.lines = self.text.splitlines()
        self.error = "\n".join(_COLOURS.sub("", line) for output in outputs for line in output.get("traceback", ()))
        """The traceback; empty without an error."""
        self.error_name = next((output.ename for output in outputs if output.output_type == "error"), "")
        self.pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        self.values = [output.data.get("text/plain") for output in outputs if output.output_type == "execute_result"]


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel whose working directory is `folder`."""
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=TIMEOUT_S,
        allow_errors=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel():
        yield Kernel(client)
