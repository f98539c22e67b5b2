"""The outcome of a recipe's run: a table for people, and the same as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist
from rich.table import Table

from paceline.core import strict_json
from paceline.core.output.files import write_file
from paceline.core.output.tables import print_table
from paceline.core.output.wording import counted, digits
from paceline.core.processes.missing_ranks import collective
from paceline.core.processes.world import World
from paceline.core.state.digests import weights_sha256
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointError
from paceline.tools.recipes.options import TrainingOptions
from paceline.train import Result


@dataclass(frozen=True)
class Report:
    """The outcome of a recipe's run."""

    metrics: Mapping[str, float]
    """Means over the held-out samples, by the names that the recipe gives its :class:`~paceline.train.Evaluation`."""
    steps: int
    """Optimizer steps since the very beginning."""
    seconds: float
    """Time spent training in this run, without evaluation."""
    samples_per_second: float
    """Training samples of all ranks in a second."""
    world_size: int
    """Number of ranks."""
    gradient_bytes_per_step: int
    """Bytes of gradient that each rank hands to communication in a step."""
    exposed_share: float
    """Share of rank 0's training time spent waiting for communication, 0..1."""
    replicas_identical: bool
    """Whether all entries of ``replica_sha256`` are equal."""
    replica_sha256: list[str]
    """SHA-256 of the weights, computed on each rank, in the order of ranks."""
    resumed_from_step: int | None
    """Step of the checkpoint that this run went on from; None for a fresh start."""
    restarts: int
    """Number of times that all ranks were started again after a failure."""
    steps_redone: int
    """Completed optimizer steps that had to be computed again after failures."""
    rescued_from: str | None
    """Source of the last restart: ``"memory"`` or ``"disk"``; None for the beginning, and without restarts."""

    def to_json(self) -> str:
        """Return the report as text, with the metrics beside the other figures."""
        figures = asdict(self)
        return strict_json.lenient({**figures.pop("metrics"), **figures}, indent=2) + "\n"


def gather_report(model: DistributedDataParallel, result: Result, world: World) -> Report:
    """Gather the report. All ranks call this together, and get the same report but for the times."""
    hashes = [""] * world.size
    with collective("comparison of weights"):
        dist.all_gather_object(hashes, weights_sha256(model))
    return Report(
        metrics=dict(result.metrics),
        steps=result.steps,
        seconds=result.seconds,
        samples_per_second=result.samples_per_second,
        world_size=world.size,
        gradient_bytes_per_step=model.gradient_bytes_per_step,
        exposed_share=result.exposed_share,
        replicas_identical=len(set(hashes)) == 1,
        replica_sha256=hashes,
        resumed_from_step=result.resumed_from_step,
        restarts=result.history.restarts if result.history else 0,
        steps_redone=result.history.steps_redone if result.history else 0,
        rescued_from=result.history.rescued_from if result.history else None,
    )


def print_report(recipe: str, report: Report, metrics: Sequence[str]) -> None:
    """Print the table, in which `metrics` come first."""
    table = Table(title=f"{recipe}, {counted(report.world_size, 'rank')}", show_header=False)
    table.add_column(style="bold")
    # Folded rather than cut where the terminal is narrow.
    table.add_column(justify="right", overflow="fold")
    for name in metrics:
        value = report.metrics[name]
        table.add_row(
            name.replace("_", " "),
            digits(value) if name.endswith("_per_second") else f"{value:.4f}" if value < 1000 else f"{value:,.0f}",
        )
    table.add_row("steps", f"{report.steps:,}")
    if report.resumed_from_step is not None:
        table.add_row("resumed from step", f"{report.resumed_from_step:,}")
    if report.restarts:
        source = f"from {report.rescued_from}" if report.rescued_from else "from the beginning"
        table.add_row("started again", f"{counted(report.restarts, 'time')}, {source}")
        table.add_row("steps computed again", f"{report.steps_redone:,}")
    table.add_row("seconds", f"{report.seconds:.2f}")
    table.add_row("samples/s", digits(report.samples_per_second))
    table.add_row("gradient bytes per step", f"{report.gradient_bytes_per_step:,}")
    table.add_row("waiting for communication", f"{report.exposed_share:.1%} of the time")
    table.add_row("replicas identical", "yes" if report.replicas_identical else "NO")
    print_table(table)
    # Below the table: in a cell, a narrow terminal would break it in two, and it could not be copied.
    print(f"SHA-256 of the weights {report.replica_sha256[0]}")


def finish(recipe: str, report: Report, metrics: Sequence[str], result: Result, config: TrainingOptions) -> None:
    """Print the report on rank 0 and write it as JSON; all ranks call this at the end."""
    if dist.get_rank() == 0:
        print_report(recipe, report, metrics)
        write_file("--json", config.json, report.to_json())
    # A script may have another way to keep the model that fit() returns; a recipe has none.
    if result.steps in result.failed_saves:
        raise CheckpointError(
            f"training has ended at step {result.steps}, but that step is not saved in {config.checkpoint_dir}; "
            "make room there, and --resume goes on from the newest checkpoint"
        )
