"""The Blackwell backward by pairs of blocks, or by single ones, whatever the area of a mask says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from composattn.backends.blackwell import backward_tiling
from composattn.backends.blackwell.backward_tiling import KINDS, BlackwellBackwardTiling, WideBackwardTiling
from composattn.backends.blackwell.tiling import TABLES
from composattn.backends.fused.planning.facts import BEYOND, Facts
from composattn.backends.fused.planning.tables import first
from composattn.dispatch import plan_cache

NOTHING = dict.fromkeys(("by_head", "by_row", "by_column", "by_distance", "by_pair", "curved"), False)


@contextlib.contextmanager
def sharing(blocks: int) -> Iterator[list[Facts]]:
    """Plans that are made meanwhile have so many blocks for a tile of keys, where there is a choice; who asked."""
    asked: list[Facts] = []

    def kind_of(call: Facts) -> type[BlackwellBackwardTiling]:
        long = call.but(mask="none", seen=BEYOND, length=BEYOND, **NOTHING)
        one, two = (
            BlackwellBackwardTiling if call.widest <= 128 else WideBackwardTiling,
            KINDS[first(TABLES["kinds"], long)],
        )
        if one is not two:
            asked.append(call)
        return one if blocks == 1 else two

    with mock.patch.object(backward_tiling, "kind_of", kind_of), mock.patch.dict(plan_cache._plans, clear=True):
        yield asked
