"""A warp's product, and the copies that bring its operands: the numbers that PTX says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composattn.emulator.findings import CollectiveMismatch
from composattn.emulator.mode import EAGER, LATE, Mode
from tests.cpu.emulator.harness import execute, module

# thread t's words i of a (4), b (2) and c (4) come from p0 + 16 t, p1 + 8 t and p2 + 16 t, and its d goes to p3 + 16 t
MULTIPLY = """
mov.u32 %r0, %tid.x; mul.wide.u32 %d5, %r0, 16; mul.wide.u32 %d6, %r0, 8;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2]; ld.param.u64 %d3, [p3];
add.u64 %d0, %d0, %d5; add.u64 %d1, %d1, %d6; add.u64 %d2, %d2, %d5; add.u64 %d3, %d3, %d5;
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];
ld.global.v2.b32 {%r5, %r6}, [%d1];
ld.global.v4.b32 {%r7, %r8, %r9, %r10}, [%d2];
GUARD mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%r11, %r12, %r13, %r14}, {%r1, %r2, %r3, %r4}, {%r5, %r6},
    {%r7, %r8, %r9, %r10};
st.global.v4.b32 [%d3], {%r11, %r12, %r13, %r14};
"""


def text(dtype: torch.dtype, guard: str = "") -> str:
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    return module(MULTIPLY.replace("KIND", kind).replace("GUARD", guard), 4, threads=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_sixteen_rows_and_eight_columns(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(2, *shape, generator=draw) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b = a.to(dtype), b.to(dtype)
    t = torch.arange(32)
    row, pair = t // 4, t % 4 * 2
    left = [a[:, row + 8 * (i % 2), pair + 8 * (i // 2) + e] for i in range(4) for e in range(2)]
    right = [b[:, pair + 8 * i + e, row] for i in range(2) for e in range(2)]
    sums = [c[:, row + 8 * h, pair + e] for h in range(2) for e in range(2)]
    given = [torch.stack(words, -1).contiguous().view(torch.int16).numpy() for words in (left, right)]
    found = np.zeros((2, 32, 4), np.float32)
    execute(text(dtype), [*given, torch.stack(sums, -1).contiguous().numpy(), found], threads=64)
    want = (a.double() @ b.double() + c.double()).float()
    wanted = torch.stack([want[:, row + 8 * h, pair + e] for h in range(2) for e in range(2)], -1)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-6, atol=1e-5)


def test_a_product_by_some_lanes_is_refused() -> None:
    guarded = "setp.lt.u32 %p1, %r0, 5; @%p1"
    arrays = [np.zeros((64, 4), np.uint32), np.zeros((64, 2), np.uint32), *np.zeros((2, 64, 4), np.uint32)]
    with pytest.raises(CollectiveMismatch, match="under divergence"):
        execute(text(torch.float16, guarded), arrays, threads=64)


COPY = """
mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 4; mov.u32 %r2, smem; add.u32 %r3, %r2, %r1; mul.wide.u32 %d5, %r0, 16;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; add.u64 %d0, %d0, %d5; add.u64 %d1, %d1, %d5;
and.b32 %r4, %r0, 1; shl.b32 %r4, %r4, 4;
cp.async.cg.shared.global [%r3], [%d0], 16, %r4;
cp.async.commit_group;
cp.async.wait_group 0;
ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3];
st.global.v4.b32 [%d1], {%r5, %r6, %r7, %r8};
"""


@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
def test_lanes_that_read_nothing_copy_zeros(mode: Mode) -> None:
    source, found = np.arange(1, 129, dtype=np.uint32).reshape(32, 4), np.full((32, 4), 7, np.uint32)
    execute(module(COPY, 2, shared=512), [source, found], mode=mode)
    assert np.array_equal(found[1::2], source[1::2]) and not found[::2].any()
