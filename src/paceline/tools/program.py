"""Programs that run on ranks: the command checks their configuration and passes it to the ranks as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console

from paceline.core.command_line import or_near
from paceline.core.messages import say
from paceline.errors import UsageError

Config = TypeVar("Config", bound="ProgramConfig")


@dataclass(frozen=True)
class ProgramConfig:
    """Base class of program configurations. Each field must hold a JSON value."""

    def to_json(self) -> str:
        """Return the settings as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[Config], text: str) -> Config:
        """Parse the result of :meth:`to_json`."""
        return cls(**json.loads(text))


def option(default: Any, help: str, metavar: str | None = None) -> Any:
    """Declare a configuration field that is also a command-line option.

    Args:
        default: default value.
        help: one sentence for ``--help``.
        metavar: placeholder for the value in ``--help``; by default the field's type.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar})


def validate_script(name: str, recipes: Iterable[str]) -> None:
    """Check that `name` is an existing script or one of the `recipes`."""
    if not Path(name).is_file():
        near = or_near(name, [*recipes, *glob("*.py")])
        raise UsageError(f"{name!r} is neither a recipe nor a file{near or '; name a recipe or a Python script'}")


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
    """Run the module ``program…`` with CONFIG on `nproc` ranks, and return the exit code.

    Args:
        program: the module and any arguments before the configuration.
        config: the configuration, already checked.
        nproc: the number of ranks.
        screen: the stream that shows rank 0's progress.
        note: a remark to print before the ranks start.
        env: variables to add to the ranks' environment.
        modules: modules to import before ranks are forked.
        settings: further fields of :class:`paceline.launch.job.Job`.
    """
    from paceline.launch.agent import launch  # loads torchelastic, which --help does not need
    from paceline.launch.hook.run_module import module_command
    from paceline.launch.job import Job

    if note:
        say(note)
    command = module_command(*program, config.to_json())
    try:
        return launch(Job(command, nproc, env=env or {}, modules=modules, **settings))
    finally:
        # Rank 0's progress bar hides the cursor, and a killed rank cannot restore it.
        with suppress(OSError):
            Console(file=screen).show_cursor()
