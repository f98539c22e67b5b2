"""Headless Chromium for tests of pages: ``run_in_page`` runs a script in the page and returns what it reports.

    values = run_in_page(page, "report(document.title)", tmp_path)

Skips the test if Chromium is not installed.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

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
PATIENCE_S = 300
_REPORTS = """<script>
const report = (value) => {
  const line = document.createElement("pre");
  line.className = "test-report";
  line.textContent = JSON.stringify(value);
  document.body.append(line);
};
addEventListener("error", (event) => report({error: String(event.message)}));
</script>"""


def run_in_page(page: str, script: str, folder: Path, *options: str, milliseconds: int = 20_000) -> list[Any]:
    """Run `script` after the page's own, for `milliseconds` of the page's clock; return the values it reports."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed; on Debian: apt-get install chromium")
    assert "</body>" in page
    changed = page.replace("<head>", f"<head>{_REPORTS}", 1).replace("</body>", f"<script>{script}</script></body>", 1)
    file = folder / "page.html"
    file.write_text(changed, "utf-8")
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'chromium'}", f"--virtual-time-budget={milliseconds}"]
    result = subprocess.run(
        [*command, *options, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "HOME": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    reports = re.findall(r'<pre class="test-report">(.*?)</pre>', result.stdout, re.DOTALL)
    return [json.loads(html.unescape(report)) for report in reports]
