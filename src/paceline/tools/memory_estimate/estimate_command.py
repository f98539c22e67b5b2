"""``paceline estimate-memory``: a table of the memory that a training takes on each rank.

The command imports its parts when it is called, because these need torch, and ``--help`` does not.
"""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch

    from paceline.tools.memory_estimate.activations import Activations, Batch
    from paceline.tools.memory_estimate.footprints import Footprint, Training

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_RANKS = 4096
COLUMNS = ("weights", "gradients", "state", "communication", "activations")
MARGIN = 0.2
"""Relative error within which an estimated peak is expected."""
EXAMPLES = """Examples:

paceline estimate-memory HuggingFaceTB/SmolLM2-360M --nproc 8 --batch-size 4 --sequence-length 2048

paceline estimate-memory HuggingFaceTB/SmolLM2-360M --dtype float32 --autocast bfloat16 --sequence-length 2048

paceline estimate-memory model.py:build --nproc 2,4,8 --optimizer sgd+momentum --batch-size 32 --input-shape 3,224,224

paceline estimate-memory folder/config.json --optimizer adafactor --json
"""


def estimate_memory(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name on the Hugging Face hub, a folder with a config.json or such a file, or a function, class or "
            "module in your code: package.module:build, model.py:Net. The file is imported, so guard the training in a "
            'script with if __name__ == "__main__".',
            show_default=False,
        ),
    ],
    nproc: Annotated[str, typer.Option(metavar="LIST", help="Numbers of ranks, separated by commas.")] = "2,4,8",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="One of torch.optim, with options: sgd+momentum, adamw+amsgrad, sgd+momentum=0.8."
        ),
    ] = "adamw",
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help=f"Of weights: {', '.join(DTYPES)}; the model's own by default.")
    ] = None,
    autocast: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype of torch.autocast around the forward (mixed precision).")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a micro-batch of one rank.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens in a sample.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Shape of a sample that is not tokens, such as 3,224,224.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="cpu or cuda: where the training will run. The estimate itself needs no GPU."
        ),
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the bytes as JSON.")] = False,
) -> None:
    """Estimate the peak of each rank's memory in training, without allocating any: DDP, sharded optimizer, FSDP2."""
    from paceline.tools.memory_estimate.activations import activations_of
    from paceline.tools.memory_estimate.footprints import Training
    from paceline.tools.memory_estimate.models import build_model
    from paceline.tools.memory_estimate.optimizer_state import parse_optimizer

    counts, state = _counts(nproc), parse_optimizer(optimizer)
    _check_device(device)
    weights, cast = _dtype("--dtype", dtype), _dtype("--autocast", autocast)
    batch = _batch(batch_size, sequence_length, input_shape, autocast)
    built = build_model(model)
    training = Training(built.module, state, weights := weights or built.dtype)
    footprints = {count: training.footprints(count) for count in counts}
    # After the footprints, so that an unsupported optimizer is reported before the model runs.
    activations = activations_of(built, batch, weights, cast, on_gpu=device == "cuda") if batch else None
    show, title = _print_json if json else _print, f"{model}: {type(built.module).__name__}"
    show(title, training, _rows(footprints, activations, device), batch)


def _rows(footprints: dict[int, list[Footprint]], activations: Activations | None, device: str) -> list[dict[str, Any]]:
    from paceline.tools.memory_estimate.activations import Activations
    from paceline.tools.memory_estimate.footprints import DEVICES

    return [
        {
            "nproc": count,
            "strategy": each.strategy,
            **{name: getattr(each, name) for name in COLUMNS[:-1]},
            "activations": None if activations is None else activations.total,
            "peak": each.peak(DEVICES[device], count, activations or Activations()),
        }
        for count, group in footprints.items()
        for each in group
    ]


def _print_json(title: str, training: Training, rows: list[dict[str, Any]], batch: Batch | None) -> None:
    summary = {
        "model": title,
        "parameters": training.count,
        "trained": training.trained_count,
        "optimizer": training.optimizer.title,
        "batch": None if batch is None else batch.title,
        "margin": MARGIN,
        "ranks": rows,
    }
    print(json_text.dumps(summary))


def _print(title: str, training: Training, rows: list[dict[str, Any]], batch: Batch | None) -> None:
    from rich.console import Console

    from paceline.core.output.tables import new_table, print_table
    from paceline.core.output.wording import nbytes

    total, trained = training.count, training.trained_count
    dtypes = " and ".join({str(each.dtype).removeprefix("torch."): None for each in training.parameters})
    some = "" if trained == total else f", {trained:,} of them trained"
    columns = [name for name in COLUMNS if name != "activations" or batch is not None] + ["peak"]
    table = new_table(["ranks", "on each rank", *columns], words=("on each rank",))
    for number, row in enumerate(rows):
        is_first = number == 0 or rows[number - 1]["nproc"] != row["nproc"]
        if is_first:
            table.add_section()
        ranks = f"{row['nproc']:,}" if is_first else ""
        table.add_row(ranks, row["strategy"], *(nbytes(row[name]) for name in columns))
    console = Console()
    heading = f"{title}, {total:,} parameters ({dtypes}){some}; {training.optimizer.title}"
    # Without wrapping, because rich assumes some width when the output is not a terminal.
    console.print(heading, soft_wrap=True, highlight=False, markup=False)
    print()
    print_table(table, keys=2)
    print()
    for note in _notes(training, batch):
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _notes(training: Training, batch: Batch | None) -> list[str]:
    names = training.layer_names.most_common(3)
    layers = ", ".join(f"{count} × {name}" for name, count in names) + ", …" * (len(training.layer_names) > 3)
    gathered = f"the root and two layers ({layers})" if layers else "the whole model, which has no list of layers"
    activations = (
        "Activations are not counted; give --batch-size with --sequence-length or --input-shape."
        if batch is None
        else f"Activations: the tensors that autograd saves in a forward of {batch.title}, and the outputs."
    )
    return [
        "Each row shows the rank that holds the most.",
        "Communication: torch DDP copies all gradients into buckets, unless gradient_as_bucket_view=True; Paceline "
        "holds the gradients of one bucket and a copy of the buffers; the sharded optimizer also holds updated "
        f"parameters, fewer between ranks on one host; FSDP2 gathers {gathered}, with their gradients.",
        activations,
        f"Peak: the sum, with an allowance for temporaries, workspaces and libraries; expect it to be within "
        f"{MARGIN:.0%}. Python and imported libraries are not included.",
    ]


def _batch(size: int | None, sequence_length: int | None, shape: str | None, autocast: str | None) -> Batch | None:
    """Return the batch that the options describe; None without any."""
    from paceline.tools.memory_estimate.activations import Batch

    for name, number in (("batch-size", size), ("sequence-length", sequence_length)):
        if number is not None and number < 1:
            raise UsageError(f"--{name}={number} is less than 1; give 1 or more")
    if sequence_length is not None and shape is not None:
        raise UsageError("--sequence-length is for tokens and --input-shape for other inputs; give one of them")
    if shape is None and sequence_length is None:
        if size is None and autocast is not None:
            raise UsageError("--autocast changes only activations; give a batch as well, or leave it out")
        if size is None:
            return None
        raise UsageError("--batch-size needs --sequence-length, for tokens, or --input-shape; give one of them")
    if shape is None:
        return Batch(size or 1, sequence_length)
    words = [word.strip() for word in shape.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--input-shape {shape}: give the shape of one sample, such as 3,224,224")
    return Batch(size or 1, None, tuple(map(int, words)))


def _check_device(device: str) -> None:
    from paceline.tools.memory_estimate.footprints import DEVICES

    if device not in DEVICES:
        raise UsageError(f"--device {device}: choose one of {', '.join(DEVICES)}")


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= MAX_RANKS for word in words):
        raise UsageError(f"--nproc={text}: give numbers of ranks from 1 to {MAX_RANKS}, with commas, such as 2,4,8")
    return sorted(set(map(int, words)))


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    import torch

    if name is not None and name not in DTYPES:
        raise UsageError(f"{option} {name}: choose one of {', '.join(DTYPES)}")
    return None if name is None else getattr(torch, name)
