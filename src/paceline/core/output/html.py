"""HTML documents with embedded styles, scripts and data, in a light and a dark theme."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any


def document(title: str, body: str, styles: str, scripts: Sequence[str]) -> str:
    """Return the document; the styles of the theme come before `styles`."""
    code = "\n".join(f"<script>\n{script}\n</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{resource("paceline.core.output", "theme.css")}
{styles}
</style>
</head>
<body>
{body}
{code}
</body>
</html>
"""


def data_block(name: str, value: Any) -> str:
    """Return an element with the id `name` that holds `value` as JSON."""
    # "</script>" in a string would end the element.
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def resource(package: str, *path: str) -> str:
    """Return the text of a file that belongs to `package`."""
    return files(package).joinpath(*path).read_text("utf-8")
