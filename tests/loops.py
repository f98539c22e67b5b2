"""A small training script for tests of whole jobs: a model, an optimizer, a Checkpointer, and a loop."""

from __future__ import annotations

from textwrap import indent


def loop(
    steps: int,
    checkpointer: str = 'paceline.Checkpointer("saved")',
    *,
    begin: str = "",
    before: str = "",
    after: str = "",
    end: str = "checkpointer.close()",
) -> str:
    """Return a script that resumes and trains until step `steps`, with code of the test inserted.

    `begin` runs after ``paceline.init()``, `before` and `after` around each step. ``start`` counts restarts.
    """
    return f"""
import json, os, shutil, signal, subprocess, sys, time, torch, paceline
start, world = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), paceline.init()
{begin}
torch.manual_seed(world.rank)  # ranks with equal inputs get a warning
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = {checkpointer}
checkpointer.register("model", model)
checkpointer.register("optimizer", optimizer)
step = first_step = checkpointer.restore() if checkpointer.steps() else 0
while step < {steps}:
{indent(before, "    ")}
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step = checkpointer.step()
{indent(after, "    ")}
{end}
"""
