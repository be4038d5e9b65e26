"""Every row of the table of differences is true, and the page shows the table."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.cpu.flex_conformance.differences import DIFFERENCES, VECTORS, Difference, K, Q, V
from tests.cpu.flex_conformance.truth import check
from tests.support import docs_script


def maker() -> ModuleType:
    return docs_script("make_flex_conformance")


def test_the_page_is_current() -> None:
    made = maker()
    assert made.PAGE.read_text() == made.page(), "run: python docs/make_flex_conformance.py"


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.what)
def test_a_difference_is_as_the_table_says(difference: Difference) -> None:
    if difference.error is None:
        found = difference.shown()
        assert not any(t.isnan().any() for t in torch.utils._pytree.tree_leaves(found) if t is not None)
        return
    with pytest.raises(difference.error):
        difference.shown()
    assert difference.error.__name__ in difference.ours


@pytest.mark.parametrize("name", VECTORS)
def test_rows_that_a_mod_reduces_are_served(name: str, generator: torch.Generator) -> None:
    check(VECTORS[name], Q, K, V, generator)
