"""``paceline estimate-memory``: a table of the memory that a training takes on each rank.

The command imports its parts when it is called, because these need torch, and ``--help`` does not.
"""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch

    from paceline.tools.memory_estimate.estimate import Estimate

DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_RANKS = 4096
EXAMPLES = """Examples:

paceline estimate-memory HuggingFaceTB/SmolLM2-360M --nproc 8 --batch-size 4 --sequence-length 2048

paceline estimate-memory HuggingFaceTB/SmolLM2-360M --dtype bfloat16 --master-dtype float32

paceline estimate-memory model.py:build --nproc 2,4,8 --optimizer sgd+momentum --batch-size 32 --input-shape 3,224,224

paceline estimate-memory folder/config.json --optimizer adafactor --json
"""


def estimate_memory(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name on the Hugging Face hub, a folder with a config.json or such a file, or a function, class or "
            "module of yours: package.module:build, model.py:Net. A file is imported, so a script trains.",
            show_default=False,
        ),
    ],
    nproc: Annotated[str, typer.Option(metavar="LIST", help="Numbers of ranks, with commas.")] = "2,4,8",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="One of torch.optim, with options: sgd+momentum, adamw+amsgrad, sgd+momentum=0.8."
        ),
    ] = "adamw",
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help=f"Of weights: {', '.join(DTYPES)}; the model's own by default.")
    ] = None,
    master_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of copies that are trained in place of bf16 and fp16 weights.")
    ] = None,
    autocast: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of torch.autocast around the forward: mixed precision.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a micro-batch of one rank.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a sample.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="Of a sample that is no tokens, such as 3,224,224.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="KIND", help="cpu or cuda: whose kernels and optimizers; nothing runs there.")
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the bytes as JSON.")] = False,
) -> None:
    """Estimate the peak of each rank's memory in training, without allocating any: DDP, sharded optimizer, FSDP2."""
    from paceline.tools.memory_estimate.batch import batch_of, run_of
    from paceline.tools.memory_estimate.contents import contents_of
    from paceline.tools.memory_estimate.estimate import Estimate
    from paceline.tools.memory_estimate.hub_models import build_hub_model
    from paceline.tools.memory_estimate.kernels import device_of
    from paceline.tools.memory_estimate.python_models import build_python_model, is_import_path
    from paceline.tools.memory_estimate.strategies import Training
    from paceline.tools.memory_estimate.trial import parse_optimizer

    counts, kind = _counts(nproc), device_of(device)
    trial = parse_optimizer(optimizer, is_foreach=kind.has_foreach)
    weights, master, cast = _dtypes(dtype=dtype, master_dtype=master_dtype, autocast=autocast)
    if (batch := batch_of(batch_size, sequence_length, input_shape)) is None and cast is not None:
        raise UsageError("--autocast changes activations alone; give a batch, too, or leave it out")
    built = build_python_model(model) if is_import_path(model) else build_hub_model(model)
    training = Training(contents_of(built.module, weights := weights or built.dtype), trial, master)
    if master is not None and not training.has_masters:
        raise UsageError(f"--master-dtype {master_dtype} is for weights in bf16 or fp16; give --dtype, or leave it out")
    training.footprints(counts[0])  # before the forward, so that an unfit optimizer is told of first
    if batch is not None:
        training = replace(training, run=run_of(model, built, batch, dtype=weights, autocast=cast, device=kind))
    footprints = {count: training.footprints(count) for count in counts}
    _show(Estimate(f"{model}: {type(built.module).__name__}", training, footprints, batch, kind), json)


def _show(estimate: Estimate, as_json: bool) -> None:
    if as_json:
        print(json_text.dumps(estimate.to_json()))
    else:
        estimate.print()


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        counts = []
    if not counts or not all(1 <= count <= MOST_RANKS for count in counts):
        raise UsageError(f"--nproc={text}: give numbers of ranks from 1 to {MOST_RANKS}, with commas, such as 2,4,8")
    return sorted(set(counts))


def _dtypes(**options: str | None) -> list[torch.dtype | None]:
    """Return the dtypes that the options name, in their order."""
    import torch

    for option, name in options.items():
        if name is not None and name not in DTYPES:
            raise UsageError(f"--{option.replace('_', '-')} {name}: choose one of {', '.join(DTYPES)}")
    return [None if name is None else getattr(torch, name) for name in options.values()]
