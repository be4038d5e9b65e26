"""The page that says which GPU gets what is what the tables say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_gpus_is_the_one_that_its_script_writes() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_gpus.py"))
    assert made["PAGE"].read_text() == made["page"](), "run: python docs/make_gpus.py"
