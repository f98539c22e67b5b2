"""The magics of ``%load_ext paceline``."""

from __future__ import annotations

import atexit
from typing import Any

from IPython.core.inputtransformer2 import cell_magic as ipython_cell_magic
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from paceline.core.messages import counted
from paceline.errors import PacelineError, UsageError
from paceline.tools.notebook.cell_parser import parsed_start, pulled, ranks_in, routed
from paceline.tools.notebook.execution import Shown
from paceline.tools.notebook.session import Session

NO_RANKS = "no ranks are running; start them with %dist_init --nproc 2, or begin the cell with %%local to run it here"


def shown(function: Any) -> Any:
    """Show a PacelineError as one line, without the kernel's traceback, which would not help the user."""

    def call(self: Any, *arguments: str) -> None:
        try:
            function(self, *arguments)
        except Shown as error:
            raise _as(error.name, error.lines) from None
        except PacelineError as error:
            raise _as(type(error).__name__, [f"{type(error).__name__}: {error}"]) from None

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def _as(name: str, lines: list[str]) -> Shown:
    """Return an error that notebooks display under the name `name`."""
    # Create a class, because notebooks show the name of the error's class.
    kind: type[Shown] = type(name, (Shown,), {"__module__": Shown.__module__})
    return kind(name, lines)


@magics_class
class RankMagics(Magics):
    """Magics that start ranks and run cells on them."""

    shell: Any
    """IPython's shell of the kernel."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.session: Session | None = None
        """The running ranks; None before ``%dist_init`` and after ``%dist_shutdown``."""

    def install(self) -> None:
        """Route every cell to the ranks."""
        self.shell.register_magics(self)
        transforms = self.shell.input_transformers_cleanup
        # Before IPython's transform, which turns a cell with %% into a call in the kernel.
        index = transforms.index(ipython_cell_magic) if ipython_cell_magic in transforms else len(transforms)
        transforms.insert(index, self._route)
        atexit.register(self.end)

    def remove(self) -> None:
        """Run cells in the kernel again and end the ranks."""
        if self._route in self.shell.input_transformers_cleanup:
            self.shell.input_transformers_cleanup.remove(self._route)
        self.end()
        atexit.unregister(self.end)

    def end(self) -> None:
        """End the ranks, if there are any."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def _route(self, lines: list[str]) -> list[str]:
        return routed(lines, self.session is not None)

    def _running(self) -> Session:
        if self.session is None:
            raise UsageError(NO_RANKS)
        return self.session

    @line_magic
    @shown
    def dist_init(self, line: str) -> None:
        """Start ranks: ``%dist_init --nproc 2 [--backend gloo] [--timeout 60]``."""
        start = parsed_start(line)
        if self.session is not None:
            ranks = counted(self.session.size, "rank")
            raise UsageError(f"already running on {ranks}; run %dist_shutdown first")
        self.session = Session(start)
        print(f"{counted(start.nproc, 'rank')} ready ({self.session.place}); cells now run on all ranks")

    @cell_magic
    @shown
    def rank(self, line: str, cell: str) -> None:
        """Run a cell on some ranks: ``%%rank [0]``, ``%%rank [0,2]``."""
        session = self._running()
        number = self.shell.execution_count - 1  # already incremented for this cell
        session.execute(ranks_in(line, session.size), "run", cell, number)

    @line_magic
    @shown
    def sync(self, line: str) -> None:
        """Run a barrier of all ranks."""
        session = self._running()
        session.execute(range(session.size), "barrier")
        print(f"{counted(session.size, 'rank')} synchronized")

    @line_magic
    @shown
    def pull(self, line: str) -> None:
        """Copy variables into the kernel: ``%pull loss from 1``, or ``%pull loss`` for a list over all ranks."""
        session = self._running()
        names, rank = pulled(line, session.size)
        self.shell.push(session.pull(names, rank))

    @line_magic
    @shown
    def dist_status(self, line: str) -> None:
        """Print each rank's process and state."""
        print("\n".join(self._running().status()))

    @line_magic
    @shown
    def dist_shutdown(self, line: str) -> None:
        """End the ranks."""
        self._running()
        self.end()
        print("all ranks have ended")


def load(shell: Any) -> None:
    """Install the magics, once for each shell."""
    unload(shell)
    RankMagics(shell).install()


def unload(shell: Any) -> None:
    """Remove the magics, and end the ranks."""
    installed = shell.magics_manager.registry.pop(RankMagics.__name__, None)
    if installed is not None:
        installed.remove()
