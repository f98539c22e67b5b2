"""Checks Paceline's DistributedDataParallel on the GPUs of this machine, and compares it with torch DDP.

    python scripts/gpu_check.py --json result.json       # all parts, about 15 minutes on one H100
    python scripts/gpu_check.py --part one stand-in      # some parts, each less than ten minutes
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
from gpu_checks.catalogue import CHECKS, PARTS, Check, chosen
from gpu_checks.rows import not_run
from gpu_checks.screen import Result

PART_SECONDS = 590.0


def run_all(checks: Sequence[Check], setting: children.Setting, results: list[Result]) -> None:
    """Run `checks`, and add each result to `results` as soon as it is available."""
    used = dict.fromkeys(PARTS, 0.0)
    for number, check in enumerate(checks, start=1):
        start = time.monotonic()
        left = PART_SECONDS - used[check.part]
        if left < 20:
            reason = f"the ten minutes for {check.part!r} are used up; run --part {check.path}"
            rows, log = [not_run(check.name, reason)], ""
        else:
            rows, log = children.run(check, setting, min(check.seconds, left - children.KILL_AFTER_S))
        results.append(Result(check, rows, time.monotonic() - start, log))
        used[check.part] += results[-1].seconds
        screen.progress(number, len(checks), results[-1])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=[], metavar="NAME", help="parts, or checks as part/check")
    parser.add_argument("--list", action="store_true", help="list parts and checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of timing (default: 20)")
    parser.add_argument("--cpu", action="store_true", help="test the script on the CPU")
    options = parser.parse_args(arguments)
    try:
        options.checks = chosen(options.part)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give at least 1")
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
    setting = children.Setting(on_gpu, torch.cuda.device_count() if on_gpu else 0, options.rounds if on_gpu else 1)
    versions, results = screen.facts(on_gpu), list[Result]()
    start, interrupted = time.monotonic(), False
    try:
        run_all(options.checks, setting, results)
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
