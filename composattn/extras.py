"""What a message says where a package is missing: the packages that an extra names.

So it is true in a clone and beside a wheel, whether or not an index has composattn.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that brings what an extra of composattn names.

    From the metadata of what is installed; of a source tree that is not installed, the tree's own extra.
    """
    try:
        required = importlib.metadata.requires("composattn") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    named = re.compile(rf"""(.+?)\s*;\s*extra == ["']{re.escape(extra)}["']""")
    packages = [found[1] for text in required if (found := named.fullmatch(text))]
    if not packages:
        return f"pip install -e '{Path(__file__).parents[1]}[{extra}]'"
    return " ".join(["pip install", *(f"'{package}'" for package in packages)])
