"""Retake the screenshots of docs/index.md: ``make gallery``. Takes two minutes and needs headless Chromium.

    scripts/gallery.py               all of them, into docs/pictures/gallery
    scripts/gallery.py explain top   some of them

Each picture shows the current output of a command: a page, or lines on a terminal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures" / "gallery"
COMMAND = [sys.executable, "-m", "paceline"]
COLUMNS = 150
LETTER, LINE, MARGIN = 8.43, 20, 16
"""Width of a letter at font size 14, height of a line, and margin, all in pixels."""
TIMEOUT_S = 300
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")

SLOW_RANK = """
import time
import torch
import paceline

world = paceline.init()
model = paceline.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100_000):
    time.sleep(0.03 * world.rank)  # rank 1 is slow
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def screenshot(page: Path, out: Path, width: int, height: int) -> None:
    """Take a screenshot of the top `width` × `height` pixels of `page`."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("Chromium is not installed; on Debian, run: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", "--virtual-time-budget=5000"]
        command = [browser, *FLAGS, *options, f"--screenshot={out}", page.as_uri()]
        environment = {**os.environ, "HOME": profile}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=TIMEOUT_S)


def run(folder: Path, *arguments: str) -> str:
    """Run ``paceline`` in `folder` as if on a color terminal, and return its output."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        raise SystemExit(f"paceline {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def terminal(shown: str, command: str, folder: Path, out: Path) -> None:
    """Take a screenshot of a terminal with `command` and its output `shown`."""
    lines = Text.from_ansi(f"$ {command}\n\n{shown.strip()}").split()
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, color_system="truecolor", force_terminal=True)
        console.print(Text("\n").join(lines), soft_wrap=True)
    code = console.export_html(inline_styles=True, code_format="{code}")
    # export_html() returns the contents of a <pre> element.
    style = f"margin: {MARGIN}px; font: 14px/{LINE}px 'DejaVu Sans Mono', monospace; color: #14171a"
    page = folder / "terminal.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><pre style="{style}">{code}</pre>', "utf-8")
    width = max(line.cell_len for line in lines) * LETTER + 2 * MARGIN
    screenshot(page, out, round(width), (len(lines) + 1) * LINE + 2 * MARGIN)


def explain(folder: Path, out: Path) -> None:
    """Take a screenshot of the page about a training step."""
    run(folder, "explain", "workflow", "--out", "workflow.html")
    screenshot(folder / "workflow.html", out, 1200, 740)


def profile(folder: Path, out: Path) -> None:
    """Take a screenshot of the profile report of a job with a slow rank."""
    (folder / "train.py").write_text(SLOW_RANK)
    run(folder, "profile", "--nproc", "2", "--steps", "60", "--out", "report", "train.py")
    screenshot(folder / "report" / "report.html", out, 1200, 900)


def compare(folder: Path, out: Path) -> None:
    """Take a screenshot of the tables of a comparison."""
    arguments = ("compare", "--nproc", "2", "digits")
    terminal(run(folder, *arguments), f"paceline {' '.join(arguments)}", folder, out)


def bench(folder: Path, out: Path) -> None:
    """Take a screenshot of timed collectives."""
    arguments = ("bench", "collectives", "--nproc", "2", "--ops", "all_reduce", "--sizes", "4K,64K,1M")
    terminal(run(folder, *arguments), f"paceline {' '.join(arguments)}", folder, out)


def top(folder: Path, out: Path) -> None:
    """Take a screenshot of ``paceline top`` during a job with a slow rank."""
    (folder / "train.py").write_text(SLOW_RANK)
    job = subprocess.Popen([*COMMAND, "run", "--nproc", "2", "train.py"], cwd=folder)
    try:
        time.sleep(15)  # several hundred steps, because the view shows moving averages
        shown = run(folder, "top", "--job", str(job.pid))
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(TIMEOUT_S)
    terminal(shown, "paceline top", folder, out)


TAKEN: dict[str, Callable[[Path, Path], None]] = {
    "explain": explain,
    "profile": profile,
    "compare": compare,
    "bench": bench,
    "top": top,
}


def main() -> int:
    """Take the screenshots named on the command line; by default all."""
    parser = argparse.ArgumentParser(prog="gallery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TAKEN)}; by default all")
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder of the pictures")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in TAKEN]:
        parser.error(f"there is no picture {unknown[0]!r}; choose some of {', '.join(TAKEN)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names or TAKEN:
        with tempfile.TemporaryDirectory() as folder:
            file = given.out.resolve() / f"{name}.png"
            TAKEN[name](Path(folder), file)
            print(f"{file}: {file.stat().st_size / 1024:.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
