"""Which files of the repository are pages of the site, and where links between them lead there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/findings.md": "findings.md",
    "benchmarks/log/2026-11.md": "log/2026-11.md",
}
"""Pages that lie outside of docs/, and where the site has them."""

LINK = re.compile(r"(\[[\w./-]+\.md)?\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
"""The end of a link, and its text where that is a file's name."""

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def recipes() -> list[Path]:
    return [*sorted((ROOT / "recipes").glob("[0-9]*.py")), ROOT / "recipes" / "train_byte_lm.py"]


def places() -> dict[str, str]:
    """Each file of the repository that is a page, and where the site has it."""
    made = {f"recipes/{path.name}": f"recipes/{path.stem}.md" for path in recipes()}
    inside = {f"docs/{p.relative_to(ROOT / 'docs').as_posix()}" for p in (ROOT / "docs").rglob("*.md")}
    return ELSEWHERE | made | {"recipes": "recipes/index.md"} | {name: name[len("docs/") :] for name in inside}


def title(page: Path) -> str:
    """Its first heading."""
    return next(line[2:] for line in page.read_text().splitlines() if line.startswith("# "))


class UnknownPage(ValueError):
    """A link leads to a file that the site does not have."""


def links_turned(markdown: str, origin: str, page: str) -> str:
    """The text of `origin`, a file of the repository, with links as the site has them at `page`; code stays as it is.

    A link that shows a file's name shows the title of its page.

    Raises: `UnknownPage`.
    """
    sites = places()

    def turned(link: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[2]))
        if name in sites:
            target = sites[name]
        elif name.startswith("docs/") and (ROOT / name).is_file():
            target = name[len("docs/") :]
        else:
            raise UnknownPage(f"{origin}: the link to {link[2]} leads to no page of the site")
        shown = f"[{title(ROOT / name)}" if link[1] else ""
        return f"{shown}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{link[3] or ''})"

    parts: list[str] = []
    end = 0
    for fence in FENCED.finditer(markdown):
        parts += [LINK.sub(turned, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(turned, markdown[end:])])
