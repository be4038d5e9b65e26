"""Random calls of the forward kernels, emulated in four modes: within the tolerance, and the same bits in each."""

from __future__ import annotations

import functools
import importlib.util
import os
import random

import pytest
import torch

import composattn as ca
from composattn.emulator.cluster import EAGER, LATE, random_mode
from composattn.testing import Space, check, random_case
from tests.support import cut_as_long_ones

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

SPACE = Space(
    dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 96, 128), longest=200, kv_heads=(1, 2), groups=(1, 2),
    batches=(1, 2), gradients=False, learned=False,
)  # fmt: skip
BACKENDS = {"hopper-emulated": 4, "blackwell-emulated": 2}  # calls by default: seconds each, nearly all to compile
MODES = (EAGER, LATE, random_mode(1), random_mode(2))


def held_in_every_mode(seed: int, backend: str) -> None:
    from composattn.backends.fused.emulated import emulating

    case = random_case(seed, SPACE)
    attend = functools.partial(ca.attention, backend=backend)
    results = []
    try:
        for mode in MODES:
            with emulating(mode), torch.no_grad(), cut_as_long_ones(seed % 2 == 1):
                if mode is EAGER:
                    check(attend, case)
                mods = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "scale": case.scale}
                results.append(attend(case.q, case.k, case.v, **mods, return_lse=True))
    except Exception as error:
        raise AssertionError(f"random_case({seed}): {case}") from error
    for mode, (out, lse) in zip(MODES, results, strict=True):
        assert torch.equal(out, results[0][0]), f"random_case({seed}): out differs in {mode} mode"
        assert torch.equal(lse, results[0][1]), f"random_case({seed}): lse differs in {mode} mode"


def seeds(count: int) -> list[int]:
    draw = random.Random(os.environ.get("COMPOSATTN_TEST_SEED", "0") + ":emulator")
    return [draw.randrange(2**31) for _ in range(count)]


@pytest.mark.parametrize(("number", "backend"), [(n, b) for b, count in BACKENDS.items() for n in range(count)])
def test_random_calls(number: int, backend: str) -> None:
    held_in_every_mode(seeds(4)[number], backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(200))
def test_many_random_calls(number: int, backend: str) -> None:
    held_in_every_mode(seeds(200)[number], backend)
