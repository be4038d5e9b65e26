"""The Blackwell backward by pairs of blocks, or by single ones, whatever the area of a mask says."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from composattn.analysis.program import Program
from composattn.backends.fused.planning.sharing import Sharing
from composattn.call.problem import Problem
from composattn.dispatch import plan_cache


@contextlib.contextmanager
def sharing(blocks: int) -> Iterator[list[Problem]]:
    """Plans that are made meanwhile have so many blocks for a tile of keys, where there is a choice; who asked."""
    asked: list[Problem] = []

    def sharing_of(problem: Problem, program: Program, *sizes: Any) -> Sharing:
        asked.append(problem)
        return Sharing(blocks, "as a test asks")

    # the module, whose name in its package is that of its function
    module: Any = importlib.import_module("composattn.backends.blackwell.backward_tiling")
    with mock.patch.object(module, "sharing_of", sharing_of), mock.patch.dict(plan_cache._plans, clear=True):
        yield asked
