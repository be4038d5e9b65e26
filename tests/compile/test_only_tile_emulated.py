"""A head's only tile of keys writes dQ as it is returned, in the emulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.backends.fused.planning.cut import Cut
from composattn.backends.fused.tiles.target import HOPPER
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from tests.compile.test_backward_emulated import check

ONLY: dict[str, Any] = {"tile_m": 128, "tile_n": 128, "dq_leaves": "in bulk", "dq_begins": "only"}
STAY = {"persistent": True}
# mods, dtype, query heads, key heads, queries, keys, D, Dv, gradient through LSE, dQ in a fixed order; tiling; cut
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, int, int] | None]] = {
    "blocks-that-leave": (("plain", torch.bfloat16, 2, 2, 300, 77, 64, 64, True, False), {"resident": 64}, None),
    "blocks-that-stay": (("causal", torch.float16, 4, 2, 300, 128, 64, 64, False, False), STAY, None),
    "columns-beyond-d": (("alibi", torch.bfloat16, 2, 1, 250, 40, 40, 40, True, False), {}, None),
    "columns-d96": (("plain", torch.bfloat16, 2, 1, 150, 90, 72, 72, True, False), {"tile_m": 64}, None),
    "transposed-d128": (("causal", torch.bfloat16, 1, 1, 190, 99, 128, 128, False, False), STAY | {"tile_m": 80}, None),
    "in-pieces": (("plain", torch.bfloat16, 2, 1, 520, 100, 64, 64, False, False), {}, (2, 0, 2)),
}


@pytest.mark.parametrize("mode", (EAGER, LATE, random_mode(1)), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_only_tile_of_keys_writes_dq(case: str, mode: Mode, tmp_path: Path, generator: torch.Generator) -> None:
    facts, changes, cut = CASES[case]
    target = dataclasses.replace(HOPPER, sms=3)
    check(facts, tmp_path, generator, target, None if cut is None else Cut(*cut), mode, 2, **ONLY | changes)
