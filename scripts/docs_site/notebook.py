"""Notebooks as pages: text, code and saved outputs."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}
FENCE = "~" * 8  # longer than any fence in a cell
FOLDED = "<details><summary>Solution</summary>\n\n{}\n</details>\n"


def text_of(value: str | list[str]) -> str:
    """Return a text from a notebook file, which stores it as a string or a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def block(text: str, language: str, classes: str) -> str:
    return f"{FENCE}{{code-block}} {language}\n:class: {classes}\n\n{text.rstrip()}\n{FENCE}\n"


def printed(output: dict[str, Any]) -> str:
    """Return the text of an output without color codes."""
    if output["output_type"] == "error":
        text = "\n".join(output["traceback"])
    elif output["output_type"] == "stream":
        text = text_of(output["text"])
    else:
        text = text_of(output["data"].get("text/plain", ""))
    return ANSI.sub("", text)


def picture(output: dict[str, Any], folder: Path, name: str) -> str | None:
    """Write the picture of an output into `folder`. Return its file name, or None if the output has no picture."""
    for kind, suffix in PICTURES.items():
        if kind in output.get("data", {}):
            content = text_of(output["data"][kind])
            data = base64.b64decode(content) if suffix == "png" else content.encode()
            (folder / f"{name}.{suffix}").write_bytes(data)
            return f"{name}.{suffix}"
    return None


def write_page(notebook: Path, folder: Path, rewrite: Callable[[str], str]) -> None:
    """Write the page and pictures of `notebook` into `folder`. `rewrite` converts the links of a text."""
    parts: list[str] = []
    for number, cell in enumerate(json.loads(notebook.read_text("utf-8"))["cells"]):
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(rewrite(source) + "\n")
            continue
        if source.strip():
            code = block(source, "python", "cell")
            is_solution = "solution" in cell["metadata"].get("tags", [])
            parts.append(FOLDED.format(code) if is_solution else code)
        for index, output in enumerate(cell.get("outputs", [])):
            drawn = picture(output, folder, f"{notebook.stem}-{number}-{index}")
            if drawn:
                parts.append(f"![what the cell above drew]({drawn})\n")
            elif text := printed(output).strip("\n"):
                parts.append(block(text, "text", "output"))
    (folder / f"{notebook.stem}.md").write_text("\n".join(parts), "utf-8")
