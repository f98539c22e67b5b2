"""Does what ``%load_ext paceline`` and ``%unload_ext paceline`` ask for."""

from __future__ import annotations

from typing import Any

from paceline.tools.notebook.magics import RankMagics


def load(shell: Any) -> None:
    """Install the magics, once for each shell."""
    unload(shell)
    RankMagics(shell).install()


def unload(shell: Any) -> None:
    """Remove the magics, and end the ranks."""
    installed = shell.magics_manager.registry.pop(RankMagics.__name__, None)
    if installed is not None:
        installed.remove()
