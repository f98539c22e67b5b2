"""The report of a recipe's run, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from rich.table import Table

from paceline.core import strict_json
from paceline.core.digests import weights_sha256
from paceline.core.messages import counted, digits
from paceline.core.missing_ranks import collective
from paceline.core.output_files import write_file
from paceline.core.tables import print_table
from paceline.core.world import World
from paceline.ddp import DistributedDataParallel
from paceline.errors import CheckpointError
from paceline.tools.recipes.configs import TrainingOptions
from paceline.train import Result

Report = dict[str, Any]
"""Metrics and figures of a run, by their names in ``--json``."""


def gather_report(model: DistributedDataParallel, result: Result, world: World) -> Report:
    """Return the report, which is the same on every rank except for times. Collective."""
    hashes = [""] * world.size
    with collective("comparison of weights"):
        dist.all_gather_object(hashes, weights_sha256(model))
    history = result.history
    return {
        **result.metrics,
        "steps": result.steps,
        "seconds": result.seconds,
        "samples_per_second": result.samples_per_second,
        "world_size": world.size,
        "gradient_bytes_per_step": model.gradient_bytes_per_step,
        "exposed_share": result.exposed_share,
        "replicas_identical": len(set(hashes)) == 1,
        "replica_sha256": hashes,
        "resumed_from_step": result.resumed_from_step,
        "restarts": history.restarts if history else 0,
        "steps_redone": history.steps_redone if history else 0,
        "rescued_from": history.rescued_from if history else None,
    }


def print_report(recipe: str, report: Report, metrics: Sequence[str]) -> None:
    """Print the table, with `metrics` first."""
    table = Table(title=f"{recipe}, {counted(report['world_size'], 'rank')}", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    for name in metrics:
        value = report[name]
        table.add_row(
            name.replace("_", " "),
            digits(value) if name.endswith("_per_second") else f"{value:.4f}" if value < 1000 else f"{value:,.0f}",
        )
    table.add_row("steps", f"{report['steps']:,}")
    if report["resumed_from_step"] is not None:
        table.add_row("resumed from step", f"{report['resumed_from_step']:,}")
    if report["restarts"]:
        table.add_row(
            "started again", f"{counted(report['restarts'], 'time')}, from {report['rescued_from'] or 'the beginning'}"
        )
        table.add_row("steps computed again", f"{report['steps_redone']:,}")
    table.add_row("seconds", f"{report['seconds']:.2f}")
    table.add_row("samples/s", digits(report["samples_per_second"]))
    table.add_row("gradient bytes per step", f"{report['gradient_bytes_per_step']:,}")
    table.add_row("waiting for communication", f"{report['exposed_share']:.1%} of the time")
    table.add_row("replicas identical", "yes" if report["replicas_identical"] else "NO")
    print_table(table)
    # Below the table, because a cell would wrap in a narrow terminal.
    print(f"SHA-256 of the weights {report['replica_sha256'][0]}")


def finish(recipe: str, report: Report, metrics: Sequence[str], result: Result, config: TrainingOptions) -> None:
    """Print the report on rank 0 and write it as JSON. Called on all ranks."""
    if dist.get_rank() == 0:
        print_report(recipe, report, metrics)
        write_file("--json", config.json, strict_json.lenient({"version": 1} | report, indent=2) + "\n")
    if result.steps in result.failed_saves:
        raise CheckpointError(
            f"the last step {result.steps} could not be saved in {config.checkpoint_dir}; make room there, and use "
            "--resume to continue from the newest checkpoint"
        )
