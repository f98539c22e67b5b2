"""Checks Paceline's DistributedDataParallel on the GPUs of this machine, and compares it with torch DDP.

    python scripts/gpu_check.py --json result.json       # all parts, about 15 minutes on one H100
    python scripts/gpu_check.py --part one stand-in      # some parts, each takes one to three minutes
    python scripts/gpu_check.py --part share/abort       # one check
    python scripts/gpu_check.py --list
    python scripts/gpu_check.py --cpu                    # tiny sizes on the CPU, to test the script

Run it from the source tree, with Paceline's dependencies installed. It uses random weights and needs no network. Each
check runs in separate processes and has a time limit. Buckets are used even on a single rank. The report at the end
shows all results; send it to us with the JSON.

Exit code: 0 if all checks passed, 1 if a check failed, 2 without a GPU or after a usage error, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for code that is shared with the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from gpu_checks import children, screen
from gpu_checks.catalogue import CHECKS, PARTS, chosen
from gpu_checks.rows import not_run
from gpu_checks.screen import Result


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=[], metavar="NAME", help="parts, or checks as part/check")
    parser.add_argument("--list", action="store_true", help="list parts and checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--cpu", action="store_true", help="test the script on the CPU")
    options = parser.parse_args(arguments)
    try:
        options.checks = chosen(options.part)
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    return options


def list_checks() -> None:
    for part, title in PARTS.items():
        print(f"{part}: {title}")
        for check in CHECKS:
            if check.part == part:
                print(f"    {check.path:<26} {check.ranks.value}, at most {check.seconds} s, {check.gib:g} GiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, and return the exit code."""
    options = parsed(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the jobs that checks start
    if options.list:
        list_checks()
        return 0
    on_gpu = not options.cpu
    if on_gpu and not (torch.cuda.is_available() and dist.is_nccl_available()):
        print("gpu_check: this PyTorch finds no CUDA GPU with NCCL; use --cpu to test the script", file=sys.stderr)
        return 2
    versions, results = screen.facts(on_gpu), list[Result]()
    start, interrupted = time.monotonic(), False
    try:
        for number, check in enumerate(options.checks, start=1):
            began = time.monotonic()
            rows, log = children.run(check, on_gpu)
            results.append(Result(check, rows, time.monotonic() - began, log))  # at once, for Ctrl-C
            screen.progress(number, len(options.checks), results[-1])
    except KeyboardInterrupt:
        interrupted = True
        for check in options.checks[len(results) :]:
            results.append(Result(check, [not_run(check.name, "the run was interrupted")], 0.0))
    print(screen.report(results, versions, time.monotonic() - start))
    if options.json is not None:
        document: dict[str, Any] = {"facts": versions, "results": [result.as_json() for result in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if interrupted:
        return 130
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
