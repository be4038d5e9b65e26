"""The Blackwell backward by pairs of blocks, or by single ones, whatever the area of a mask says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

from composattn.backends.blackwell import backward_tiling
from composattn.backends.blackwell.backward_tiling import TABLE, BlackwellBackwardTiling, WideBackwardTiling
from composattn.backends.fused.planning.call_class import BEYOND, CallClass, Facts, MaskKind
from composattn.backends.fused.planning.tables import first
from composattn.dispatch import plan_cache

NOTHING = dict.fromkeys(("by_head", "by_row", "by_column", "by_distance", "by_pair", "curved"), False)


@contextlib.contextmanager
def sharing(blocks: int) -> Iterator[list[CallClass]]:
    """Plans that are made meanwhile have so many blocks for a tile of keys, where there is a choice; who asked."""
    asked: list[CallClass] = []

    def kind_of(facts: Facts) -> type[BlackwellBackwardTiling]:
        call = facts.call
        long = dataclasses.replace(call, mask=MaskKind.NONE, seen=BEYOND, length=BEYOND)
        one, two = BlackwellBackwardTiling if call.widest <= 128 else WideBackwardTiling, first(TABLE, long, **NOTHING)
        if one is not two:
            asked.append(call)
        return one if blocks == 1 else two

    with mock.patch.object(backward_tiling, "kind_of", kind_of), mock.patch.dict(plan_cache._plans, clear=True):
        yield asked
