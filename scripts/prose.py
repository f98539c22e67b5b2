"""Counts phrases that read as if translated, in docstrings, comments, error messages and Markdown.

    python scripts/prose.py                  # phrases per 10,000 words in source, docs and README
    python scripts/prose.py --show docs      # list them

`house.py` checks the rates against ``budget.json``. The rates are only an indicator: rewrite the whole sentence instead
of replacing the phrase.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {
    "source": ("src",),
    "docs": ("docs",),
    "README": ("README.md",),
    "tests": ("tests",),
    "scripts": ("scripts", "benchmarks", "examples", "Makefile", ".ci/run"),
}
PHRASES = re.compile(
    "|".join(
        (
            # a clause that should be a noun, a condition or a participle
            r"\bwhat(?:ever)? (?:is|was|are|it|they|a|the|this|has|can|came|each|others|users|one|no|ranks|must)\b",
            r"\b[Ww]here (?:it|an?|the|this|that|no|some|they|users|ranks|all|one|nobody|there|you|each|others|its)\b",
            r"\b[Tt]hose (?:that|of|which|who|whose|in|from|with|on)\b",
            r"\b(?:of|in|to|for|from|by|at|with|on|after|before) (?:which|whom|whose)\b",
            r", as (?:it|they|the|an?|this|that|no|others|all|is|in|one|other|each|none|what|there|ever|before)\b",
            r"\b(?:nor|so) (?:is|are|does|do|has|have|was|can)\b",
            r"\b(?:is|are|was|were) no (?!longer|more\b|matter)\w+",
            r"\bha(?:s|ve) nothing to\b|\b(?:is|are) to be\b",
            # words that PyTorch's documentation rarely uses
            r"\b(?:nobody|somebody|nothing|anybody)\b",
            r"\bof (?:ours|theirs|its own|their own|our own|one's own|his own|her own)\b",
            r"\b(?:told|tells?|telling)\b",
            r"\b(?:alike|anew|likewise|thereof|in vain|therein|whereby|hence)\b",
            r"\bso (?:many|long|much|few|far)\b(?! as)",
            r"(?:^|\. )Such\b|, too\b|\b(?:there|then)[.;]",
        )
    )
)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield strings that are statements by themselves, such as docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, error messages and comments of a file with their line numbers."""
    tree = ast.parse(source)
    for docstring in docstrings(tree):
        yield docstring.lineno, str(docstring.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:type:|noqa|!)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of text and tables, without code blocks and link targets."""
    prose = re.sub(r"<!--.*?-->|```.*?```", lambda block: "\n" * block.group().count("\n"), source, flags=re.DOTALL)
    for number, line in enumerate(prose.splitlines(), 1):
        if line.strip() and not line.startswith(("    ", "|--", "|:-")):
            yield number, re.sub(r"`[^`]*`|\([^)]*\.md[^)]*\)", "X", line)


def script_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a Makefile or shell script."""
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)##? (.*)", line):
            yield number, comment[1]


def texts(part: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a part with their locations."""
    for path in (ROOT / name for name in PARTS[part]):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and (file.suffix in READERS or file == path):
                for line, text in READERS.get(file.suffix, script_texts)(file.read_text("utf-8")):
                    yield f"{file.relative_to(ROOT)}:{line}", text


READERS = {".py": python_texts, ".md": markdown_texts}


def rates() -> dict[str, int]:
    """Return the phrases per 10,000 words in each part."""
    numbers = {}
    for name in PARTS:
        found = [(len(PHRASES.findall(text)), len(text.split())) for _, text in texts(name)]
        phrases, words = (sum(column) for column in zip(*found, strict=True))
        numbers[f"phrases in 10,000 words of {name}"] = round(10_000 * phrases / words)
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", choices=PARTS, help="list the phrases of one part")
    shown = parser.parse_args().show
    for place, text in texts(shown) if shown else ():
        for phrase in PHRASES.finditer(text):
            print(f"{place}: {text[max(phrase.start() - 40, 0) : phrase.end() + 40]!r}")
    for name, rate in rates().items():
        print(f"{name}: {rate}")
