"""``paceline checkpoint audit``: every tensor of every copy, bit by bit, and each sample once per epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from paceline import documents
from paceline.checkpoint import codec, consumed_once, copies, inspection, manifest, sample_ledger, verify
from paceline.checkpoint.command_output import add_row, make_table, print_json, printable
from paceline.checkpoint.consumed_once import Epoch
from paceline.checkpoint.inspection import Inspected
from paceline.checkpoint.room import readable
from paceline.checkpoint.sample_ledger import Run
from paceline.errors import NoCheckpoint
from paceline.output_tables import print_table

MOST_SHOWN = 20  # differences of one step


@dataclass(frozen=True)
class AuditedStep:
    """The copies of the checkpoint of `step`; ``problems`` is empty if all are complete and equal."""

    step: int
    paths: tuple[str, ...]
    tensors: int
    nbytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class AuditedData:
    """The data that led to the newest complete checkpoint in `folder`."""

    folder: str
    step: int
    runs: tuple[Run, ...]
    epochs: tuple[Epoch, ...]
    problems: tuple[str, ...]
    """Of all its checkpoints, each named."""


def audit_checkpoints(folders: Sequence[str], json: bool) -> None:
    """Compare every tensor of every copy bit by bit, and prove that each sample was used once per epoch."""
    found = [(place, list(inspection.inspect(place, steps, every_byte=True))) for place, steps in _located(folders)]
    steps = list(_audited_steps([each for _, all_of in found for each in all_of]))
    data = [_audited_data(place, all_of) for place, all_of in found]
    passed = not any(each.problems for each in steps) and not any(each.problems for each in data)
    if json:
        print_json({"passed": passed, "checkpoints": [asdict(each) for each in steps], "data": list(map(_plain, data))})
    else:
        _print_tables(steps, data)
        typer.echo(_verdict(steps, data, passed))
    if not passed:
        raise typer.Exit(1)


def _located(folders: Sequence[str]) -> Iterator[tuple[Path, list[int]]]:
    seen: set[tuple[Path, int]] = set()
    for folder in folders:
        place, steps = inspection.locate(folder)
        new = [step for step in steps if (place.resolve(), step) not in seen]  # one that is named twice is no copy
        seen.update((place.resolve(), step) for step in new)
        if new:
            yield place, new


def _audited_steps(found: Sequence[Inspected]) -> Iterator[AuditedStep]:
    if not found:
        raise NoCheckpoint("there is no checkpoint any more; check whether a run is deleting them")
    for step in sorted({each.step for each in found}):
        same = [each for each in found if each.step == step]
        problems = [f"{each.path}: {damage}" for each in same for damage in each.damages]
        reference = next((each for each in same if not each.damages), same[0])
        for other in same:
            if other is not reference:
                problems += [f"{other.path}: {each}" for each in copies.differences(reference, other)]
        known = reference.manifest
        tensors = 0 if known is None else copies.count_tensors(known)
        yield AuditedStep(step, tuple(str(each.path) for each in same), tensors, reference.nbytes, tuple(problems))


def _audited_data(place: Path, found: Sequence[Inspected]) -> AuditedData:
    """Check the ledger of every checkpoint in a folder; describe that of the newest."""
    runs: tuple[Run, ...] = ()
    epochs: list[Epoch] = []
    problems: list[str] = []
    step = 0
    for each in found:
        if each.manifest is None or each.damages:
            continue
        try:
            runs = sample_ledger.read(each.path, each.manifest)
            epochs, step = consumed_once.check(runs), each.step
            problems += [f"{each.path}: {problem}" for problem in _positions(each.path, runs)]
        except verify.Damaged as damage:
            problems.append(f"{each.path}: {damage}")
            continue
        for epoch in epochs:
            problems += [f"{each.path}: {epoch.source!r}, epoch {epoch.epoch}: {text}" for text in epoch.problems]
    return AuditedData(str(place), step, runs, tuple(epochs), tuple(problems))


def _positions(path: Path, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the sources whose saved position is not where their ledger ends."""
    objects = documents.parse(verify.read_document(path / manifest.STATE))["objects"]
    for name in sorted({name for run in runs for name in run.sources} & set(objects)):
        try:
            state = codec.decode(objects[name]["state"], {})
        except ValueError:
            continue  # a user's loader, whose state has tensors
        if (problem := consumed_once.position_problem(name, runs, state)) is not None:
            yield problem


def _print_tables(steps: Sequence[AuditedStep], data: Sequence[AuditedData]) -> None:
    table = make_table(">step", ">copies", ">tensors", ">size", "result")
    for each in steps:
        result = "equal" if len(each.paths) > 1 else "complete"
        result = f"{len(each.problems)} problems" if each.problems else result
        add_row(table, each.step, len(each.paths), each.tensors, readable(each.nbytes), result)
    print_table(table)
    for account in data:
        if account.epochs:
            typer.echo()
            typer.echo(printable(f"data that led to step {account.step} in {account.folder}"))
            print_table(_epochs_table(account.epochs))
            for line in _history(account.runs):
                typer.echo(line)
    for problems in [*(each.problems for each in steps), *(each.problems for each in data)]:
        for problem in problems[:MOST_SHOWN]:
            typer.echo(printable(problem))
        if len(problems) > MOST_SHOWN:
            typer.echo(f"and {len(problems) - MOST_SHOWN} more")


def _epochs_table(epochs: Sequence[Epoch]) -> Table:
    table = make_table("source", ">epoch", ">batches", ">samples", "ranks", "result")
    for each in epochs:
        used = f"{each.used} of {'?' if each.length is None else each.length}"
        ranks = ", ".join(map(str, each.ranks))
        add_row(
            table,
            each.source,
            each.epoch,
            used,
            "?" if each.samples is None else each.samples,
            ranks,
            "; ".join(each.problems) or "each once",
        )
    return table


def _history(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        ranks = "1 rank" if run.ranks == 1 else f"{run.ranks} ranks"
        start = "started" if run.resumed_at is None else f"resumed at step {run.resumed_at}"
        yield f"{start} with {ranks}, saved step {run.saved}"
    if runs and runs[0].resumed_at is not None:
        yield f"what was used before step {runs[0].resumed_at} was not recorded"
    for first, last in consumed_once.steps_done_again(runs):
        yield f"steps {first} to {last} were done again: what was done before was lost, and does not count as used"


def _verdict(steps: Sequence[AuditedStep], data: Sequence[AuditedData], passed: bool) -> str:
    if not passed:
        return "audit: FAILED"
    several = [each for each in steps if len(each.paths) > 1]
    tensors = "every byte as it was written" + (", every tensor of every copy equal" if several else "")
    told = [account for account in data if account.epochs]
    if not told:
        return f"audit: passed: {tensors}; no registered object told which samples were used"
    whole = all(account.runs[0].resumed_at is None for account in told)
    return f"audit: passed: {tensors}; each sample used once per epoch{'' if whole else ' since the record begins'}"


def _plain(account: AuditedData) -> dict[str, Any]:
    again = [list(each) for each in consumed_once.steps_done_again(account.runs)]
    return {**asdict(account), "steps_done_again": again}
