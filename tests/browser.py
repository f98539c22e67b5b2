"""Headless Chromium for tests of pages: ``run_in_page`` runs a script in the page and returns what it reports.

    values = run_in_page(page, "report(document.title)", tmp_path)

Skips the test if Chromium is not installed.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from chromium import find_chromium, run_chromium

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
    browser = find_chromium()
    if browser is None:
        pytest.skip("Chromium is not installed; on Debian: apt-get install chromium")
    assert "</body>" in page
    changed = page.replace("<head>", f"<head>{_REPORTS}", 1).replace("</body>", f"<script>{script}</script></body>", 1)
    file = folder / "page.html"
    file.write_text(changed, "utf-8")
    shown = run_chromium(browser, file, *options, "--dump-dom", milliseconds=milliseconds)
    reports = re.findall(r'<pre class="test-report">(.*?)</pre>', shown, re.DOTALL)
    return [json.loads(html.unescape(report)) for report in reports]
