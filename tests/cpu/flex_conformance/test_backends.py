"""Semantics of flex_attention on other backends: the reference here, emulated kernels in `make test-all`."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.flex_conformance.catalogue import BASIC, MASKS, MORE, capped, causal, slopes, squared, window
from tests.cpu.flex_conformance.truth import Mod, Mods, check, draw
from tests.support import has_kernel_toolchain


@pytest.mark.parametrize("score", [*BASIC, *MORE])
def test_score_mods_by_the_reference(score: Mod, generator: torch.Generator) -> None:
    check(Mods.of(score, causal), *draw(generator, q_len=33, kv_len=40), generator, backend="reference")


@pytest.mark.parametrize("mask", MASKS)
def test_masks_by_the_reference(mask: Mod, generator: torch.Generator) -> None:
    check(Mods.of(None, mask), *draw(generator, kv_heads=2), generator, backend="reference")


@pytest.mark.slow
@pytest.mark.skipif(not has_kernel_toolchain(), reason="no kernel toolchain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [causal, window])
@pytest.mark.parametrize("score", [None, slopes, squared, capped])
def test_emulated_kernels(score: Mod | None, mask: Mod, dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, v = draw(generator, 1, 2, 70, dim=64, kv_heads=1, dtype=dtype)
    check(Mods.of(score, mask), q, k, v, generator, backend="hopper-emulated")
