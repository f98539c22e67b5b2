"""The estimate as a table, with notes on the parts that are counted or not, and as JSON.

Decisions 0040 and 0052 say why.
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
from paceline.tools.memory_estimate.dry_run import DryRun
from paceline.tools.memory_estimate.kernels import Device
from paceline.tools.memory_estimate.live_bytes import LARGE
from paceline.tools.memory_estimate.strategies import DDP, FSDP2, SHARDED, TORCH_DDP, Footprint, Training

_COLUMNS = ("weights", "gradients", "state", "communication", "activations")
_COMMUNICATION = {
    TORCH_DDP: "a second copy of the gradients, in buckets (none with gradient_as_bucket_view=True)",
    DDP: "the gradients that wait for their bucket, as large as one, and a copy of the module's buffers",
    SHARDED: "the same, and updated parameters on their way (less among ranks that share a host's memory)",
}


_PEAK = {
    "cpu": (
        "Peak: the most at once, with temporaries of operators and of the optimizer; resident memory beyond that of a "
        "rank after its imports, without buckets of other ranks that it maps. Not counted: Python and imported "
        "libraries, sparse gradients."
    ),
    "cuda": (
        "Peak: the most at once, with temporaries of operators and of the optimizer, as "
        "torch.cuda.max_memory_allocated() has it; not compared with a GPU yet. Not counted: the CUDA context, gaps of "
        "the allocator, sparse gradients."
    ),
}
STATE_IN_GAPS, GAPS, STEP_IN_GAPS = 0.65, 0.23, 0.45
"""Shares of a backward's small blocks: those among which the optimizer's state lies afterwards, and those that are too
small for the next backward's; and the share of the step's temporaries that are too small for each other. Measured, see
decision 0052."""
CONVOLUTION_GAPS, MORE_OF_EQUAL_SIZE, EQUAL_SIZES = 0.45, 0.25, (0.4, 0.5)
"""The same share as ``GAPS`` with convolutions, in which the state lies, too. Added to it where most blocks have one
size: none up to the first share of equal sizes, all from the second on. malloc takes a free block for an aligned one
only if that is larger, which it is where a free neighbour was joined to it."""
MOST_IN_GAPS = LARGE * 3 // 2
"""Largest part of the state that lies there; a heap gives its end back from twice ``LARGE`` on."""


def range_of(footprint: Footprint, run: DryRun, device: Device, ranks: int) -> tuple[int, int, int]:
    """Return the lowest, the usual and the highest peak of a rank on `device`.

    A heap keeps small blocks when they are freed. The optimizer puts its state among those of the first backward, the
    next backwards find too little room between, and temporaries of the step seldom fit where backward's have been.
    Tensors that stay lie where a convolution's workspace has been, so that the next one lies elsewhere.
    """
    found = []
    for libraries, kept in zip(device.libraries, device.kept, strict=True):
        peak = footprint.peak
        if kept:
            small = run.small_share * footprint.backward
            # From twice LARGE on a heap gives its end back.
            step = min(footprint.step_in_heap, 2 * LARGE)
            state = min(footprint.state, STATE_IN_GAPS * small, MOST_IN_GAPS)
            gaps = state + GAPS * small
            if run.convolutions:
                gaps = max(state, _gaps_of_convolutions(run) * small) + min(run.workspace, LARGE)
            between = step + int(kept * (gaps + STEP_IN_GAPS * step))
            peak = max(peak, footprint.constant[0] + footprint.backward + between)
        kernels = (run.convolutions > 0) * device.convolutions + run.convolutions * device.convolution
        beside = libraries + kernels + (ranks > 1) * device.group
        found.append(peak + beside)
    return found[0], found[1], found[2]


def _gaps_of_convolutions(run: DryRun) -> float:
    few, most = EQUAL_SIZES
    return CONVOLUTION_GAPS + MORE_OF_EQUAL_SIZE * min(1.0, max(0.0, (run.equal_share - few) / (most - few)))


@dataclass(frozen=True)
class Estimate:
    """The bytes that were found for one model."""

    title: str
    training: Training
    footprints: Mapping[int, Sequence[Footprint]]
    """Footprints of the strategies, by number of ranks."""
    batch: Batch | None
    device: Device

    @property
    def activations(self) -> int | None:
        """Bytes of activations; None without a batch."""
        return None if self.batch is None else self.training.run.activations

    def range_of(self, footprint: Footprint, ranks: int) -> tuple[int, int, int]:
        """Return the lowest, the usual and the highest peak of a strategy on one of `ranks` ranks."""
        return range_of(footprint, self.training.run, self.device, ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain values, in bytes."""
        parameters = self.training.contents.parameters
        return {
            "model": self.title,
            "parameters": sum(each.numel() for each in parameters),
            "trained": sum(each.numel() for each in parameters if each.requires_grad),
            "optimizer": self.training.trial.title,
            "batch": None if self.batch is None else self.batch.title,
            "loss": self.training.run.loss or None,
            "device": self.device.name,
            "ranks": [
                {
                    "nproc": ranks,
                    "strategy": each.strategy,
                    **{name: getattr(each, name) for name in _COLUMNS if name != "activations"},
                    "activations": self.activations,
                    **dict(zip(("low", "peak", "high"), self.range_of(each, ranks), strict=True)),
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
        # Unbroken, because rich assumes some width where output is no terminal.
        console.print(heading.replace("torch.", ""), soft_wrap=True, highlight=False, markup=False)
        print_table(self._table(), keys=2)
        for note in self._notes():
            console.print(note, soft_wrap=True, highlight=False, markup=False)

    def _table(self) -> Table:
        columns = [name for name in _COLUMNS if name != "activations" or self.activations is not None]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("ranks", justify="right", no_wrap=True)
        table.add_column("on each rank", no_wrap=True)
        for name in [*columns, "peak", "range"]:
            table.add_column(name, justify="right", no_wrap=True)
        for ranks, footprints in self.footprints.items():
            for each in footprints:
                values = {**asdict(each), "activations": self.activations or 0}
                low, peak, high = map(nbytes, self.range_of(each, ranks))
                cells = [*(nbytes(values[name]) for name in columns), peak, _range(low, high)]
                is_first, is_last = each is footprints[0], each is footprints[-1]
                first = f"{ranks:,}" if is_first else ""
                table.add_row(first, each.strategy, *cells, end_section=is_last)
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
            notes.append(
                "Activations, and temporaries of operators: give --batch-size, with --sequence-length or --input-shape."
            )
        else:
            notes.append(
                f"Activations: the tensors that autograd saves in a forward of {self.batch.title}, and the outputs. "
                f"Loss: {self.training.run.loss}."
            )
        notes.append(_PEAK[self.device.name])
        return notes


def _range(low: str, high: str) -> str:
    """Return two amounts as a range, with their unit once if they share it."""
    number, unit = low.split(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"
