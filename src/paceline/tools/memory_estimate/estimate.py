"""The estimate as a table, with notes on the parts that are counted or not, and as JSON.

Decision 0040 says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from paceline.core.output.tables import print_table
from paceline.core.output.wording import nbytes
from paceline.tools.memory_estimate.batch import Batch
from paceline.tools.memory_estimate.strategies import DDP, FSDP2, SHARDED, TORCH_DDP, Footprint, Training

_COLUMNS = ("weights", "gradients", "state", "communication", "activations")
_HEADERS = {"state": "optimizer state"}
_COMMUNICATION = {
    TORCH_DDP: "a second copy of the gradients, in buckets (none with gradient_as_bucket_view=True)",
    DDP: "the gradients that wait for their bucket, as large as one, and a copy of the module's buffers",
    SHARDED: "the same, and updated parameters on their way (none among ranks that share a host's memory)",
}


@dataclass(frozen=True)
class Estimate:
    """The bytes that were found for one model."""

    title: str
    training: Training
    footprints: Mapping[int, Sequence[Footprint]]
    """Footprints of the strategies, by number of ranks."""
    batch: Batch | None
    activations: int | None
    """Bytes of activations; None without a batch."""

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain values, in bytes."""
        parameters = self.training.contents.parameters
        return {
            "model": self.title,
            "parameters": sum(each.numel() for each in parameters),
            "trained": sum(each.numel() for each in parameters if each.requires_grad),
            "optimizer": self.training.trial.title,
            "batch": None if self.batch is None else self.batch.title,
            "ranks": [
                {
                    "nproc": ranks,
                    **asdict(each),
                    "activations": self.activations,
                    "total": each.total + (self.activations or 0),
                }
                for ranks, footprints in self.footprints.items()
                for each in footprints
            ],
        }

    def print(self) -> None:
        """Print the table, and notes below."""
        console = Console()
        trained_as = "" if self.training.master_dtype is None else f", masters in {self.training.master_dtype}"
        heading = f"{self.title}, {self.training.contents.title}; {self.training.trial.title}{trained_as}"
        console.print(heading.replace("torch.", ""), soft_wrap=True, highlight=False, markup=False)
        print_table(self._table())
        for note in self._notes():
            console.print(note, soft_wrap=True, highlight=False, markup=False)

    def _table(self) -> Table:
        columns = [name for name in _COLUMNS if name != "activations" or self.activations is not None]
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("ranks", justify="right", no_wrap=True)
        table.add_column("on each rank", no_wrap=True)
        for name in [*columns, "total"]:
            table.add_column(_HEADERS.get(name, name), justify="right", no_wrap=True)
        for ranks, footprints in self.footprints.items():
            for each in footprints:
                values = {**asdict(each), "activations": self.activations or 0}
                total = sum(values[name] for name in columns)
                cells = [nbytes(values[name]) for name in columns]
                is_first, is_last = each is footprints[0], each is footprints[-1]
                first = f"{ranks:,}" if is_first else ""
                table.add_row(first, each.strategy, *cells, nbytes(total), end_section=is_last)
        return table

    def _notes(self) -> list[str]:
        layers = self.training.contents.layers_title
        parts = f"the root's and two layers' ({layers})" if layers else "the whole model's, which has no list of layers"
        notes = [
            "The rank with the most: weights and the module's buffers, gradients after backward, state after step.",
            *(f"Communication, {name}: {tensors}." for name, tensors in _COMMUNICATION.items()),
            f"Communication, {FSDP2}: {parts} gathered weights and whole gradients.",
        ]
        if self.training.has_masters:
            notes.append(
                f"State has the masters; with {FSDP2} they are the weights. The sharded optimizer casts its share of "
                "gradients to their dtype."
            )
        if self.batch is None:
            notes.append("Activations: give --batch-size, with --sequence-length or --input-shape.")
        else:
            notes.append(
                f"Activations: the tensors that autograd saves in a forward of {self.batch.title}, and the outputs; "
                "scaled_dot_product_attention as its flash kernel."
            )
        notes.append(
            "Not counted: temporary memory of single operations, a loss outside of the model, sparse gradients, the "
            "allocator's gaps, and the memory of Python, libraries and a CUDA context."
        )
        return notes
