"""Settings of the docs site, which ``make docs`` builds with Sphinx (decision 39)."""

import paceline

project = "Paceline"
copyright = "The Paceline authors, Apache-2.0"
version = release = paceline.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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


def show_tables_as_they_are(*event: object) -> None:
    """Turn a table of a docstring, drawn with bars for the terminal, into a literal block."""
    lines: list[str] = event[-1]  # type: ignore[assignment]
    shown: list[str] = []
    for line in lines:
        in_table = line.startswith("|")
        if in_table and not (shown and shown[-1].startswith("    |")):
            shown += ["::", ""]
        shown.append(f"    {line}" if in_table else line)
    lines[:] = shown


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", show_tables_as_they_are)  # type: ignore[attr-defined]
