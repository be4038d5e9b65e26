"""Random gradients of the generated kernels, emulated in four modes: within the tolerance, and the same bits in each.

`python -m tests.cpu.emulator.test_fuzz_backward blackwell-emulated 0 160 [wide-pair]` runs so many, and prints each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import random
import sys
from typing import ClassVar

import pytest
import torch

import composattn as ca
from composattn.testing import Case, run
from composattn.testing.cases import draw_case
from composattn.testing.tolerance import assert_attention_close
from tests.cpu.emulator.test_fuzz_forward import (
    FEW_ROWS,
    MODES,
    SEVERAL_TILES,
    gpu_of,
    held_in_every_mode,
    report,
    seeds,
)
from tests.pairs import sharing
from tests.support import planned_as

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

LEARNED = {"gradients": True, "learned": True, "layouts": ("dense", "dense", "varlen")}
SPACES = tuple(dataclasses.replace(space, **LEARNED) for space in (FEW_ROWS, SEVERAL_TILES))  # type: ignore[arg-type]
ABOVE_256 = (64, 264, 320, 512, 512)
BY_TWO = (104, 112, 120, 128, 128, 128)  # head dimensions of which two blocks may share a tile of keys
WIDE_BY_TWO = (64, 136, 192, 200, 224, 256, 256, 256)  # likewise, of queries too
# calls by default: ten seconds each, most to compile
BACKENDS = {"hopper-emulated": 1, "blackwell-emulated": 2, "warp-emulated": 1}


@dataclasses.dataclass(frozen=True)
class GradientCall:
    """A case, whether dQ is summed in a fixed order, and how many blocks share a tile of keys if there is a choice.

    `gpu`: see `gpu_of`.
    """

    case: Case
    in_order: bool
    blocks: int
    gpu: int

    head_dims: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def of(cls, seed: int) -> GradientCall:
        choices = random.Random(seed)
        space, blocks = choices.choice(SPACES), choices.choice((1, 2))
        if cls.head_dims or blocks == 2:
            space = dataclasses.replace(space, head_dims=cls.head_dims or BY_TWO)
        return cls(draw_case(choices, space), choices.randint(0, 2) == 0, blocks, choices.randint(0, 11))

    def results(self, backend: str) -> list[dict[str, torch.Tensor]]:
        """What the call returns in each mode, by name."""
        from composattn.backends.fused.running.emulated import emulating

        attention = functools.partial(ca.attention, backend=backend, deterministic=self.in_order)
        found = []
        with sharing(self.blocks), planned_as(backend, gpu_of(backend, self.gpu)):
            for mode in MODES:
                with emulating(mode):
                    found.append(run(attention, self.case))
        return found

    def check(self, backend: str) -> None:
        """Raises: AssertionError where a result is off or differs between modes; unordered dQ may by its last bits."""
        (first, *others), case = self.results(backend), self.case
        assert_attention_close(first, case)
        for mode, found in zip(MODES[1:], others, strict=True):
            for name, value in found.items():
                if name != "dq" or self.in_order:
                    assert torch.equal(value, first[name]), f"{name} differs in {mode} mode"
                else:
                    apart, size = (float(x.double().norm()) for x in (value - first[name], first[name]))
                    assert apart <= torch.finfo(value.dtype).eps * size, f"{name} is another in {mode} mode: {apart}"


class WideGradientCall(GradientCall):
    """Head dimensions above 256 among them."""

    head_dims = ABOVE_256


class WidePairGradientCall(GradientCall):
    """D or Dv above 128, not both, by two blocks: the first such draw from the seed on."""

    head_dims = (40, 64, 104, 128, 128, 136, 160, 192, 192)

    @classmethod
    def of(cls, seed: int) -> GradientCall:
        for n in itertools.count():
            call = super().of(seed + n)
            narrow, wide = sorted((call.case.q.shape[-1], call.case.v.shape[-1]))
            if narrow <= 128 < wide:
                return dataclasses.replace(call, blocks=2)
        raise AssertionError("draws never end")


class QueryPairCall(GradientCall):
    """Wide rows of Blackwell, by two blocks that have half of the queries each."""

    head_dims = WIDE_BY_TWO

    @classmethod
    def of(cls, seed: int) -> GradientCall:
        return dataclasses.replace(super().of(seed), blocks=2)


held = functools.partial(held_in_every_mode, kind=GradientCall)
held_wide_pair = functools.partial(held_in_every_mode, kind=WidePairGradientCall)
held_wide = functools.partial(held_in_every_mode, kind=WideGradientCall)
held_by_query_pairs = functools.partial(held_in_every_mode, kind=QueryPairCall)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "backend"), [(n, b) for b, count in BACKENDS.items() for n in range(count)])
def test_random_gradients(number: int, backend: str) -> None:
    held(seeds(4)[number], backend)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.nightly, pytest.mark.slow][n == 0]) for n in range(40)]
)
def test_random_gradients_of_wide_heads(number: int) -> None:
    held_wide(seeds(40)[number], "hopper-emulated")


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.nightly, pytest.mark.slow][n == 0]) for n in range(40)]
)
def test_random_gradients_of_wide_heads_by_two_blocks(number: int) -> None:
    held_wide_pair(seeds(40)[number], "blackwell-emulated")


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(40))
def test_random_gradients_by_pairs_that_share_queries(number: int) -> None:
    held_by_query_pairs(seeds(40)[number], "blackwell-emulated")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(160))
def test_many_random_gradients(number: int, backend: str) -> None:
    held(seeds(160)[number], backend)


if __name__ == "__main__":
    asked = sys.argv[1:]
    report(held_wide_pair if "wide-pair" in asked else held, *(word for word in asked if word != "wide-pair"))
