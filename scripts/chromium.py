"""Headless Chromium, for the pictures of the docs and for tests of pages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_S = 300


def find_chromium() -> str | None:
    """Return the path of the browser; None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def run_chromium(browser: str, page: Path, *options: str, milliseconds: int) -> str:
    """Open `page` for `milliseconds` of its clock, with a profile in its folder; return what the browser prints."""
    command = [browser, *FLAGS, f"--user-data-dir={page.parent / 'chromium'}", f"--virtual-time-budget={milliseconds}"]
    environment = os.environ | {"HOME": str(page.parent)}
    done = subprocess.run(
        [*command, *options, page.as_uri()], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
