"""Masks of which the compiler knows the columns that a thread never sees, whatever the query: in the emulator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.mods.mask import Mask
from composattn.testing.tolerance import Case, check

MASKS: dict[str, Any] = {
    "every second key": lambda b, h, q, kv: kv % 2 == 0,
    "one key of 32": lambda b, h, q, kv: kv % 32 == 21,
    "one column of 16": lambda b, h, q, kv: q % 16 == kv % 16,
    "one column of 64": lambda b, h, q, kv: q % 64 == kv % 64,
    "no common bits": lambda b, h, q, kv: (q & kv) == 0,
    "no key": lambda b, h, q, kv: (kv % 2 == 0) & (kv % 2 == 1),
}
LONG_RUNNING = [name for name in MASKS if name not in ("every second key", "one column of 16")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG_RUNNING)) for n in MASKS])
def test_columns_that_no_query_sees_are_hidden(name: str, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 1, 144, 64, generator=generator).bfloat16() for _ in range(3))
    dout = torch.randn(1, 1, 144, 64, generator=generator).bfloat16()
    check(partial(ca.attention, backend="hopper-emulated"), Case(q, k, v, mask_mod=Mask.of(MASKS[name]), dout=dout))
