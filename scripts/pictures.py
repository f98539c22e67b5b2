"""The pictures of README and docs, drawn by today's code: ``make pictures``. Needs headless Chromium.

    recorded runs ──▶ pages and drawings of today's code ──▶ their text, which ``make docs`` compares with the pictures
                                      └─ Chromium, light and dark ──▶ docs/pictures

``--record`` runs the jobs in the pictures again. Otherwise a picture changes only if the product does, so that its
numbers can be compared as well. An SVG contains its text; that of a PNG is in ``docs/pictures/text.json``. Text that
a page's scripts write is not compared, except for the strings in their data.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from chromium import find_chromium, run_chromium
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME, TerminalTheme

from paceline.core.job_directory import JobNote
from paceline.core.output_files import write_chart
from paceline.profiler.analyze import read_facts, report_of
from paceline.profiler.page import page as report_page
from paceline.tools.bench.report import Row, plot
from paceline.tools.explain.explain_command import KNOWN, scenes
from paceline.tools.explain.scene import page as scene_page
from paceline.tools.explain.scene import sheet
from paceline.tools.top import JobView, RankStatus, screen

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PROFILE, TOP = PICTURES / "recorded" / "profile.zip", PICTURES / "recorded" / "top.json"
TEXT = PICTURES / "text.json"
COLLECTIVES = ROOT / "benchmarks" / "results" / "2026-11-25-bench-collectives-4-ranks.json"
PACELINE = (sys.executable, "-m", "paceline")
WIDTH, HEIGHT = 1100, 1400
"""Size of the browser's window in pixels; a picture is as high as its page."""
SCHEMES = {"": 1, "-dark": 0}
"""Suffixes of the file names, and Chromium's numbers of the color schemes."""
TIMEOUT_S = 120
OUTPUT = re.compile(r"(<!-- output of: paceline (?P<command>.*) -->\n```\n)(?P<text>.*?)(?=```\n)", re.DOTALL)
"""The first lines of a command's output, in a page."""

TRAIN = """import time

import torch

import paceline


def write_metrics(rank: int) -> None:
    if rank == 1:
        time.sleep(0.01)


world = paceline.init()
torch.manual_seed(0)
layers = [layer for _ in range(3) for layer in (torch.nn.Linear(384, 384), torch.nn.ReLU())]
model = paceline.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.6)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(12_800, 384))
loader = paceline.data.DataLoader(data, batch_size=64 * world.size, shuffle=True)
for _ in range(100):
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        write_metrics(world.rank)
"""
"""A job with a slow rank."""

TERMINAL = """<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<style>
.top-matrix {{ font: {char_height}px "DejaVu Sans Mono", ui-monospace, monospace; }}
.ground {{ fill: #ffffff; }}
{styles}
@media (prefers-color-scheme: dark) {{
.ground {{ fill: #16191d; }}
DARK
}}
</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" class="ground"/>
<g class="top-matrix" transform="translate(12, 8)">
{matrix}
</g>
</svg>
"""
DARK_CHART = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.91) hue-rotate(180deg) } }</style>"
"""The dark scheme of a chart whose colors Matplotlib has written into every element."""


class VisibleText(HTMLParser):
    """The pieces of text that a reader of a page or drawing sees, in order."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.lines: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember the element; a script with data counts as one named after its type."""
        self.open.append(dict(attrs).get("type") or tag if tag == "script" else tag)

    def handle_endtag(self, tag: str) -> None:
        """Forget the element, and those inside it without an end tag."""
        while self.open and self.open.pop() not in (tag, "application/json"):
            pass

    def handle_data(self, data: str) -> None:
        """Keep text, unless it is code or folded."""
        inside = set(self.open)
        if "application/json" in inside:
            self.lines += [text for text, colon in re.findall(r'"([^"]*)"(:?)', data) if not colon]
        elif not inside & {"script", "style", "title"} and ("details" not in inside or "summary" in inside):
            self.lines += [line for line in [" ".join(data.split())] if line]


def documents() -> dict[str, str]:
    """Return the documents behind the pictures, by file name: a page for each PNG, and the drawing for each SVG."""
    report = report_of_profile()
    return {
        "profile.png": sections(report, "verdict", "advice"),
        "gallery/profile.png": sections(report, "parts", "timeline", "waits"),
        "gallery/explain.png": scene_page(scenes("bucket-overlap", 4)),
        "gallery/top.svg": top(),
        "measured-4-ranks.svg": measured_collectives(),
        **{f"{subject}.svg": sheet(scenes(subject, 4)) for subject in KNOWN},
    }


def report_of_profile() -> str:
    """Return the page of the recorded profile."""
    with TemporaryDirectory() as folder:
        shutil.unpack_archive(PROFILE, folder)
        return report_page(report_of(read_facts(Path(folder))))


def sections(page: str, *names: str) -> str:
    """Return `page` with only some of its sections."""
    section = re.compile(r'<section id="(\w+)".*?</section>', re.DOTALL)
    return section.sub(lambda match: match[0] if match[1] in names else "", page)


def top() -> str:
    """Return the recorded view of ``paceline top`` as a drawing."""
    recorded = json.loads(TOP.read_text("utf-8"))
    statuses = [{name: value for name, value in row.items() if name != "waiting_share"} for row in recorded["ranks"]]
    view = JobView(JobNote(**recorded["job"]), [RankStatus(**status) for status in statuses])

    def drawn(theme: TerminalTheme, form: str) -> str:
        return console.export_svg(title="", theme=theme, clear=False, code_format=form, unique_id="top")

    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print("$ paceline top\n", highlight=False)
    console.print(screen(view))
    return drawn(DEFAULT_TERMINAL_THEME, TERMINAL).replace("DARK", drawn(SVG_EXPORT_THEME, "{styles}"))


def measured_collectives() -> str:
    """Return the chart of ``paceline bench collectives``, drawn from a stored result."""
    result = json.loads(COLLECTIVES.read_text("utf-8"))
    names = ("op", "variant", "ranks", "nbytes", "times", "wrong")
    rows = [Row(**{name: row[name] for name in names}) for row in result["rows"]]
    with TemporaryDirectory() as folder:
        file = Path(folder, "chart.svg")
        write_chart("--plot", str(file), plot(rows, result["cores"]))
        return file.read_text("utf-8").replace("</svg>", f"{DARK_CHART}\n</svg>")


def outputs() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with the output of a command, the text of the page, and the same with today's output."""
    for page in sorted((ROOT / "docs").glob("*.md")):

        def current(match: re.Match[str]) -> str:
            command = [*PACELINE, *match["command"].split()]
            wide = os.environ | {"COLUMNS": "120"}
            done = subprocess.run(command, env=wide, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
            lines = [line.rstrip() + "\n" for line in done.stdout.splitlines()]
            return match[1] + "".join(lines[: match["text"].count("\n")])

        if OUTPUT.search(text := page.read_text("utf-8")):
            yield page, text, OUTPUT.sub(current, text)


def outdated() -> Iterator[str]:
    """Yield a line for each outdated picture, and for each outdated command output in a page."""
    noted = json.loads(TEXT.read_text("utf-8"))

    def stored(name: str) -> list[str]:
        return noted.get(name, []) if name.endswith(".png") else VisibleText((PICTURES / name).read_text("utf-8")).lines

    shown = [(PICTURES / name, stored(name), VisibleText(document).lines) for name, document in documents().items()]
    shown += [(page, text.splitlines(), current.splitlines()) for page, text, current in outputs()]
    for file, lines, current in shown:
        for old, new in zip_longest(lines, current, fillvalue=""):
            if old != new:
                yield f"{file.relative_to(ROOT)} shows {old!r}, but Paceline now prints {new!r}; run: make pictures"
                break


def draw() -> None:
    """Draw all pictures, and update the outputs in pages."""
    noted = {}
    for name, document in documents().items():
        if name.endswith(".svg"):
            (PICTURES / name).write_text(document, "utf-8")
        else:
            take_screenshots(document, PICTURES / name)
            noted[name] = VisibleText(document).lines
        print(f"docs/pictures/{name}", flush=True)
    TEXT.write_text(json.dumps(noted, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for page, _, current in outputs():
        page.write_text(current, "utf-8")


def take_screenshots(document: str, out: Path) -> None:
    """Take screenshots of a page in the light and the dark scheme."""
    browser = find_chromium()
    if browser is None:
        sys.exit("Chromium is not installed; on Debian, run: apt-get install chromium")
    with TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        bottom = "Math.ceil(document.body.getBoundingClientRect().bottom)"
        script = f"<script>setTimeout(() => document.body.dataset.bottom = {bottom}, 1000)</script></body>"
        page.write_text(document.replace("</body>", script), "utf-8")

        def run(height: int, *options: str) -> str:
            size = f"--window-size={WIDTH},{height}"
            return run_chromium(browser, page, "--hide-scrollbars", size, *options, milliseconds=5000)

        [height] = re.findall(r'data-bottom="(\d+)"', run(HEIGHT, "--dump-dom"))
        for suffix, number in SCHEMES.items():
            file = out.with_stem(out.stem + suffix)
            run(int(height), f"--blink-settings=preferredColorScheme={number}", f"--screenshot={file}")


def record() -> None:
    """Run the job of the pictures: once profiled, and once watched."""
    PROFILE.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAIN, "utf-8")
        profile = [*PACELINE, "profile", "--nproc", "2", "--steps", "60", "--out", "profile", "train.py"]
        subprocess.run(profile, cwd=folder, check=True, timeout=TIMEOUT_S)
        ranks = Path(folder, "profile", "ranks")
        for file in ranks.iterdir():
            text = file.read_text("utf-8").replace(folder, "")
            file.write_text(text.replace(f'"{socket.gethostname()}"', '"host0"'), "utf-8")
        shutil.make_archive(str(PROFILE.with_suffix("")), "zip", ranks.parent, "ranks")
        job = subprocess.Popen([*PACELINE, "run", "--nproc", "2", "train.py"], cwd=folder)
        try:
            time.sleep(10)  # several hundred steps, because the view shows moving averages
            view = subprocess.check_output([*PACELINE, "top", "--json", "--job", str(job.pid)], text=True)
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(TIMEOUT_S)
        recorded = json.loads(view)
        recorded["job"]["folder"] = ""
        for row in recorded["ranks"]:
            row["host"] = "host0"
        TOP.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the pictures of README and docs.")
    parser.add_argument("--record", action="store_true", help="run the jobs in the pictures again")
    if parser.parse_args().record:
        record()
    draw()
