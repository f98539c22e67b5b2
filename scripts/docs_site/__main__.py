"""Build the docs site into ``build/site``: ``make docs``.

Fails on any warning, such as a broken link, on a picture whose text Paceline no longer prints, and on a measured number
that differs from its data file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pictures import outdated

import paceline
from docs_site.generated import (
    benchmarks_page,
    decisions_page,
    documented,
    json_page,
    public_modules,
    reference_page,
    source_page,
    toctree,
)
from docs_site.links import Links
from docs_site.measured import check_pages
from docs_site.notebook import write_page
from docs_site.pages import ABOUT, JSON_OUTPUT, NAV, NOTEBOOKS, ROOT, pages, quickstart


def write(tree: Path, page: str, text: str, suffix: str = ".md") -> None:
    file = tree / f"{page}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def stage_reference(tree: Path) -> None:
    """Write a page for each public module."""
    names = documented(paceline)
    for module in public_modules(paceline):
        write(tree, f"reference/{module.__name__}", reference_page(module, names[module.__name__]), ".rst")
    head = "# API reference\n\nWhat each module shows in `__all__`.\n\n"
    write(tree, "reference/index", head + toctree("API reference", names, hidden=False))


def stage_notebooks(tree: Path, links: Links) -> str:
    """Write a page for each notebook, and return the sidebar entries of the pages."""
    folder = tree / "notebooks"
    folder.mkdir()
    for notebook in NOTEBOOKS:
        path = f"notebooks/{notebook.name}"
        write_page(notebook, folder, partial(links.rewrite, path=path, page=path.removesuffix(".ipynb")))
    head = "# Notebooks\n\nThe notebooks with their saved output.\n\n"
    write(tree, "notebooks/index", head + toctree("Notebooks", [path.stem for path in NOTEBOOKS], hidden=False))
    return toctree("Notebooks", ["notebooks/index"])


def stage(tree: Path) -> None:
    """Write the source tree of the site into the folder `tree`, replacing its contents."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    places = pages()
    links = Links(ROOT, places)
    shutil.copytree(ROOT / "docs" / "pictures", tree / "pictures")
    shutil.copytree(ROOT / "benchmarks" / "results", tree / "files" / "benchmarks" / "results")
    made = {
        "docs/decisions/index.md": decisions_page(ROOT / "docs" / "decisions"),
        "docs/benchmarks.md": benchmarks_page(ROOT / "benchmarks" / "results"),
        "docs/json-output.md": json_page(ROOT / JSON_OUTPUT),
    }
    for path, text in made.items():
        page = path.removeprefix("docs/").removesuffix(".md")
        write(tree, page, links.rewrite(text, path, page))
    write(tree, "quickstart", links.rewrite(quickstart(), "README.md", "quickstart"))
    stage_reference(tree)
    sidebar = [toctree(caption, entries) for caption, entries in NAV.items()]
    sidebar += [toctree("API", ["reference/index"]), stage_notebooks(tree, links), toctree("About", ABOUT)]
    for path, page in places.items():
        if path.endswith(".md"):
            text = links.rewrite((ROOT / path).read_text("utf-8"), path, page)
            write(tree, page, text + "\n".join(["", *sidebar]) if page == "index" else text)
    stage_sources(tree, links)


def stage_sources(tree: Path, links: Links) -> None:
    """Write pages for linked files, and for the files in linked folders."""
    written: set[str] = set()
    while left := sorted(links.sources - written):
        for path in left:
            text = source_page(path, ROOT / path)  # only pages of folders have links
            page = f"source/{path}"
            write(tree, page, links.rewrite(text, path, page) if (ROOT / path).is_dir() else text)
            written.add(path)


def main() -> int:
    if faults := [*outdated(), *check_pages()]:
        print(*faults, sep="\n", file=sys.stderr)
        return 1
    source, site = ROOT / "build" / "site-source", ROOT / "build" / "site"
    stage(source)
    shutil.rmtree(site, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-j", "auto", "-c", str(ROOT / "docs" / "site")]
    done = subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(site)], cwd=ROOT)
    if done.returncode == 0:
        print(f"the site is {site / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
