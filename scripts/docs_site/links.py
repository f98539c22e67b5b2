"""Turns links between files of the repository into links between pages of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

# Skips code: fenced blocks, indented blocks after an empty line, and text in backticks.
LINK_OR_CODE = re.compile(
    r"(?P<code>^```.*?^```$|(?<=\n\n)(?: {4}[^\n]*\n)+|`[^`\n]+`(?!\]))"
    r"|\]\((?!\w+:)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)

THEMED = re.compile(
    r"""^<picture>\n.* srcset="(?P<dark>.+)">\n.*<img alt="(?P<alt>.+)" src="(?P<light>.+)">\n</picture>$""",
    re.MULTILINE,
)
"""A picture for each color scheme, as GitHub shows it."""


class Links:
    """Rewrites the links of pages, and collects links to files without a page."""

    def __init__(self, root: Path, pages: Mapping[str, str]) -> None:
        self.root = root
        # Path in the repository → page.
        self.pages = pages
        # Linked files and folders without a page; a page is generated for each.
        self.sources: set[str] = set()

    def rewrite(self, text: str, path: str, page: str) -> str:
        """Return the Markdown `text` of the file `path`, with links rewritten for `page`.

        A link to a file outside the repository stays, so that Sphinx reports it.
        """

        def rewritten(match: re.Match[str]) -> str:
            if match["code"] is not None:
                return match[0]
            return f"]({self.target(match['target'], path, page)}{match['anchor'] or ''})"

        def themed(match: re.Match[str]) -> str:
            # Furo's classes follow the reader's choice on the site, which <picture> would not.
            files = {theme: self.target(match[theme], path, page) for theme in ("light", "dark")}
            images = [
                f"```{{image}} {files[theme]}\n:alt: {match['alt']}\n:class: only-{theme}\n```" for theme in files
            ]
            return "\n\n".join(images)

        return THEMED.sub(themed, LINK_OR_CODE.sub(rewritten, text))

    def target(self, target: str, path: str, page: str) -> str:
        """Return the link to put on `page` in place of a link to `target` in the file `path`."""
        linked = os.path.normpath(PurePosixPath(path).parent / target)
        file = self.root / linked
        if not file.exists():
            return target
        if linked in self.pages:
            place = f"{self.pages[linked]}.md"
        elif file.suffix in (".svg", ".png"):
            place = linked.removeprefix("docs/")
        elif file.suffix == ".json":
            place = f"files/{linked}"
        else:
            self.sources.add(linked)
            place = f"source/{linked}.md"
        return os.path.relpath(place, PurePosixPath(page).parent)
