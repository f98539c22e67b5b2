"""Settings of the docs site, which ``make docs`` builds with Sphinx (decision 39)."""

import re

from docutils import nodes

import paceline

project = "Paceline"
copyright = "The Paceline authors, Apache-2.0"
version = release = paceline.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "index"

html_theme = "furo"  # no font and no script comes from another host
html_title = f"Paceline {version}"
html_static_path = ["paceline.css"]
html_css_files = ["paceline.css"]
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4  # the anchors that GitHub gives to headings, which the pages link to
highlight_language = "none"  # an indented block is a shell's; blocks in Python say so
suppress_warnings = ["misc.highlighting_failure"]  # cells of notebooks hold magics, which are not Python
default_role = "code"  # docstrings write `name`

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_numpy_docstring = False


def keep_prose_whole(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep Napoleon from taking an attribute's first words, up to a colon, for its type: the annotation tells the type.

    Napoleon looks for a type in the first line alone; an empty comment is one without a colon.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def is_prose(line: str) -> bool:
    """Return whether a line is an unindented one that no directive, field or list begins with."""
    return (
        bool(line)
        and not line[0].isspace()
        and not line.startswith((".. ", ":", "* ", "- ", "|"))
        and line[-2:] != "::"
    )


def show_blocks_as_they_are(*event: object) -> None:
    """Make indented blocks and tables with bars, which docstrings have for the terminal, literal blocks."""
    lines: list[str] = event[-1]  # type: ignore[assignment]
    shown: list[str] = []
    last, literal = "", False  # the last line of prose, and whether a block that began after it goes on
    for number, line in enumerate(lines):
        bars = line.startswith("|")
        begins = (bars and not literal) or (
            line.startswith("    ") and not lines[number - 1].strip() and is_prose(last)
        )
        if begins and not literal:
            shown += [".. code-block:: none", ""]
            literal = True
        elif line.strip() and not bars and not line.startswith("    "):
            literal = False
        if line.strip() and not literal:
            last = line
        shown.append(f"    {line}" if bars else line)
    lines[:] = shown


def mark_drawings(app: object, page: nodes.document) -> None:
    """Give the class ``drawing`` to blocks with lines of box characters, which must not wrap."""
    for block in page.findall(nodes.literal_block):
        if "──" in block.astext():
            block["classes"].append("drawing")


def fit_tables_of_code(app: object, page: nodes.document) -> None:
    """Give the class ``wide`` to tables of four columns of code: their names may break after a period or parenthesis.

    On a phone, rows become blocks, so every cell begins with the name of its column.
    """
    for table in page.findall(nodes.table):
        head, *rows = table.findall(nodes.row)
        if len(head) != 4 or not all(cell.next_node(nodes.literal) for row in rows for cell in row):
            continue
        table["classes"].append("wide")
        for row in rows:
            for column, cell in zip(head, row, strict=True):
                cell[0].insert(0, nodes.inline("", column.astext(), classes=["column"]))
        for literal in list(table.findall(nodes.literal)):
            first, *rest = re.split(r"(?<=[.(])(?=\w)", literal.astext())
            literal[:] = [nodes.Text(first)]
            for piece in rest:
                literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(piece)]


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", mark_drawings)  # type: ignore[attr-defined]
    app.connect("doctree-read", fit_tables_of_code)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", keep_prose_whole, priority=400)  # type: ignore[attr-defined]  # before Napoleon
    app.connect("autodoc-process-docstring", show_blocks_as_they_are)  # type: ignore[attr-defined]
