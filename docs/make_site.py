"""What mkdocs asks while it builds the site: pages that lie elsewhere in the repository, links, formulas, docstrings.

`make docs` builds it. mkdocs.yml names this file twice: its `on_*` functions are mkdocs's hooks, and `Docstrings`
extends what reads the docstrings. Links of pages are written for the repository and lead to files there, so that they
work where the repository is shown. Here they are turned to the pages that these files became.
"""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from site_links import ELSEWHERE, ROOT, UnknownPage, links_turned, places, recipes


def docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def recipe_page(path: Path) -> str:
    source = path.read_text().split('"""', 2)[2].strip("\n")
    title, _, more = docstring(path).partition("\n")
    name = f"recipes/{path.name}"
    return f"# {path.stem.replace('_', ' ')}\n\n{title}\n{more}\n\n`python {name}`\n\n```python\n{source}\n```\n"


def recipe_index() -> str:
    rows = [f"| [{path.name}]({path.stem}.md) | {docstring(path).partition(chr(10))[0]} |" for path in recipes()]
    head = "# Recipes\n\nEach runs as it stands, on a CPU or a GPU: `python recipes/NAME`. `make recipes` runs all.\n\n"
    return head + "\n".join(["| | |", "|---|---|", *rows]) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie elsewhere."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for path in recipes():
        files.append(File.generated(config, f"recipes/{path.stem}.md", content=recipe_page(path)))
    files.append(File.generated(config, "recipes/index.md", content=recipe_index()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files of the repository into links to pages."""
    sites = places()
    origin = next((name for name, target in sites.items() if target == page.file.src_uri), "")
    if origin.startswith("recipes"):
        return markdown  # their links are made here

    try:
        return links_turned(markdown, origin, page.file.src_uri)
    except UnknownPage as error:
        raise PluginError(str(error)) from None


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas as MathML, which browsers draw with no script."""

    def drawn(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        display = "block" if latex.startswith("\\[") else "inline"
        return f"<{found[1]}>{convert(latex[2:-2].strip(), display=display)}</{found[1]}>"

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', drawn, content, flags=re.DOTALL)


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: arguments, which are lines `name, other: text`, become a list."""

    ARGUMENTS = re.compile(r"^((?:\*{0,2}\w+)(?:, \w+)*): (.*)$")

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.is_alias and obj.is_function:  # `*surplus, **unknown` make errors, and are no arguments
            obj.parameters = griffe.Parameters(*(p for p in obj.parameters if p.name not in ("surplus", "unknown")))
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = self.as_markdown(obj.docstring.value)

    def as_markdown(self, text: str) -> str:
        lines: list[str] = []
        for line in text.split("\n"):
            argument = self.ARGUMENTS.match(line)
            if argument and argument[1] in ("Raises", "Source", "Shapes", "Packed"):
                lines.append(f"**{argument[1]}:** {argument[2]}")
            elif argument and not argument[1][0].isupper() and (not lines or lines[-1] == "" or self.in_list(lines)):
                names = ", ".join(f"`{name}`" for name in argument[1].split(", "))
                lines.append(f"- {names}: {argument[2]}")
            else:
                lines.append(line)
        return "\n".join(lines)

    @staticmethod
    def in_list(lines: list[str]) -> bool:
        """Whether the last line belongs to an item."""
        for line in reversed(lines):
            if not line.startswith("    "):
                return line.startswith("- `")
        return False
