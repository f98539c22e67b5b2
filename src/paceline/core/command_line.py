"""Command classes for Typer, with suggestions for misspelled names."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from paceline.core.messages import end_echo, say
from paceline.errors import UsageError


def or_near(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean --nproc?" if one of the `candidates` is close to `name`; empty otherwise."""
    # Without dashes, which would make any two short options similar.
    names = {candidate.lstrip("-"): candidate for candidate in candidates}
    # mpirun and srun accept -n 2, -n2 and -np 2; torchrun accepts --nproc-per-node 2.
    if name.startswith(("-n", "--nproc")) and "nproc" in names:
        return "; did you mean --nproc?"
    near = get_close_matches(name.partition("=")[0].lstrip("-"), names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def options_of(context: Any) -> list[str]:
    """Return the options of a click context's command, ``--help`` included."""
    return [name for parameter in context.command.get_params(context) for name in parameter.opts]


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def load_torch() -> None:
    """Import torch, which takes seconds. Ctrl-C is handled after the import, which could otherwise swallow it."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        import torch  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class Commands(TyperGroup):
    """A command group that suggests a similar name for an unknown command."""

    noun = "command"
    """What messages call a command of this group."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command named by the first of `args`."""
        commands = self.list_commands(ctx)
        if args[0] not in commands and not args[0].startswith("-"):
            if f"--{args[0]}" in options_of(ctx):  # help, version
                remedy = f"; did you mean {ctx.command_path} --{args[0]}?"
            elif "run" in commands and args[0].endswith(".py"):
                remedy = f"; did you mean {ctx.command_path} run {args[0]}?"
            else:
                remedy = or_near(args[0], commands) or f"; known {self.noun}s: {', '.join(commands)}"
            raise UsageError(f"unknown {self.noun} {args[0]!r}{remedy}")
        return super().resolve_command(ctx, args)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the arguments."""
        with _interrupted_in_one_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _interrupted_in_one_line():
            return super().invoke(ctx)


@contextmanager
def _interrupted_in_one_line() -> Iterator[None]:
    """Print one line if Ctrl-C ends the block; Typer itself prints no message."""
    try:
        yield
    except KeyboardInterrupt:
        end_echo()
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
