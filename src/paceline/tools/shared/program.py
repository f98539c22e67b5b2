"""Programs that come with Paceline, as ranks: the command checks their configuration, ranks get it as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console

from paceline.core.output.commands import or_near
from paceline.core.output.messages import say
from paceline.errors import UsageError

Config = TypeVar("Config", bound="ProgramConfig")


@dataclass(frozen=True)
class ProgramConfig:
    """Base of the dataclasses that configure a program. Their values must be JSON values."""

    def to_json(self) -> str:
        """Return the settings as one argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[Config], text: str) -> Config:
        """Return the settings that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def option(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare a field of a configuration that is also a command-line option.

    Args:
        default: its value if the user gives none.
        help: one sentence for ``--help``.
        metavar: the word that stands for the value in ``--help``; by default the field's type.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar})


def validate_script(name: str, recipes: Iterable[str]) -> None:
    """Check that `name` is an existing script or one of the `recipes`."""
    if not Path(name).is_file():
        near = or_near(name, [*recipes, *glob("*.py")])
        raise UsageError(f"{name!r} is neither a recipe nor a file{near or '; name a recipe, or a Python script'}")


def start_program(
    program: Sequence[str],
    config: ProgramConfig,
    nproc: int,
    screen: TextIO,
    note: str | None = None,
    env: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Run ``python -m program… CONFIG`` on `nproc` ranks, and return the exit code.

    Args:
        program: the module, and arguments in front of the configuration.
        config: checked already.
        nproc: the number of ranks.
        screen: the stream on which rank 0 shows its progress.
        note: a remark for the user, before the ranks start.
        env: added to the ranks' environment.
        modules: that every rank needs, imported before ranks are forked.
        settings: further fields of :class:`paceline.launch.job.Job`.
    """
    from paceline.launch import job  # imports torchelastic, which the help can do without

    if note:
        say(note)
    command = [sys.executable, "-u", "-m", *program, config.to_json()]
    try:
        return job.launch(job.Job(command, nproc, env=env or {}, modules=modules, **settings))
    finally:
        # Rank 0's progress bar hides the cursor, and a rank that is killed cannot bring it back.
        with suppress(OSError):
            Console(file=screen).show_cursor()
