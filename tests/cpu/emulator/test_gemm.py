"""A warp-specialised GEMM compiled by the DSL, as it is and with bugs planted in its PTX."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

import pytest
import torch

from composattn.emulator import findings
from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.program import load

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

MODES = [EAGER, LATE, random_mode(1), random_mode(2)]
SHARED = 110_000
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@functools.cache
def captured(
    dtype: str = "bf16", consumers: int = 2, n: int = 64, k: int = 64, stages: int = 2, promoted: bool = False
) -> Captured:
    import os

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from tests.cpu.emulator.gemm_kernel import Gemm

    kinds = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}

    def tensor(kind: Any) -> Any:
        shape, unit = (cute.sym_int(), cute.sym_int()), 128 // kind.width
        return make_fake_tensor(kind, shape, stride=(cute.sym_int64(divisibility=unit), 1), assumed_align=16)

    arguments = (tensor(kinds[dtype]), tensor(kinds[dtype]), tensor(cutlass.BFloat16), make_fake_stream())
    return Captured(Gemm(kinds[dtype], consumers, n, k, stages, promoted), arguments)


def inputs(dtype: str, m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, k, generator=make).to(DTYPES[dtype]) for rows in (m, n))
    return a, b, torch.full((m, n), float("nan"), dtype=torch.bfloat16)


def multiply(
    kernel: Captured, dtype: str, m: int, n: int, k: int, mode: Mode, text: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel left, what it should have left)."""
    a, b, c = inputs(dtype, m, n, k)
    launch = kernel.launch(a, b, c, dynamic_shared=SHARED)
    run(kernel.program if text is None else load(text), launch, mode)
    return c, a.double() @ b.double().T


@pytest.mark.parametrize("shape", [(128, 64, 64), (200, 72, 328), (1, 8, 1000), (300, 200, 144)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm(dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    k = k // 16 * 16
    results = []
    for mode in MODES:
        got, want = multiply(captured(dtype), dtype, m, n, k, mode)
        # 8 bits: a step of 32 loses up to 33 units, the unit 2^-13 of the largest product or sum, some 4 sqrt(k)
        cut = k / 32 * 33 * 2.0**-13 * 4 * k**0.5 if DTYPES[dtype].itemsize == 1 else 0.0
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5 * k + cut)
        results.append(got)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("keys", [2048, 8192])
def test_sums_of_8_bits_that_are_not_promoted_lose_what_the_hardware_loses(keys: int) -> None:
    """P of N(0, 1) scores by V of mean 1, one H200: one level of sums loses 2.3 % at 2k and 10 % at 8k, two 0.2 %."""
    make = torch.Generator().manual_seed(0)
    scores = torch.randn(64, keys, generator=make)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).mul(256).to(torch.float8_e4m3fn)
    v = (torch.randn(64, keys, generator=make) + 1).to(torch.float8_e4m3fn)
    want = p.double() @ v.double().T
    errors = []
    for promoted in (False, True):
        kernel, out = captured("e4m3", consumers=1, k=128, promoted=promoted), torch.empty(64, 64, dtype=torch.bfloat16)
        run(kernel.program, kernel.launch(p, v, out, dynamic_shared=SHARED), EAGER)
        errors.append(float((out.double() - want).norm() / want.norm()))
    one, two = errors
    assert two < 2.5e-3 and {2048: 0.01, 8192: 0.06}[keys] < one < {2048: 0.04, 8192: 0.14}[keys], errors


@pytest.mark.parametrize("form", [(1, 128, 64, 3), (2, 128, 32, 4), (3, 64, 16, 2), (2, 32, 128, 2)], ids=str)
def test_gemm_of_other_tiles(form: tuple[int, int, int, int]) -> None:
    """Narrow tiles of K take the 64- and 32-byte swizzles, wide ones several boxes a tile."""
    consumers, n, k, stages = form
    got, want = multiply(captured("bf16", consumers, n, k, stages), "bf16", 200, 136, 200, LATE)
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-2)


# --- bugs planted in the PTX: (what, pattern, replacement, which occurrence, found as) -----------------------

WAIT = r"// begin inline asm\s*\{\s*\.reg \.pred\s+P1;.*?\}\s*// end inline asm"
RACES = (findings.SharedRace, findings.UninitialisedShared)
PLANTED: dict[str, tuple[str, str, int, Any]] = {
    "no wait for a full stage": (WAIT, "", -1, RACES),
    "no wait for an empty stage": (WAIT, "", 2, findings.SharedRace),
    "no wait for the products": (
        r"wgmma\.wait_group\.sync\.aligned\s+0;", "", 0, (findings.RegisterInFlight, findings.SharedRace)),
    "a weaker wait for the products": (
        r"wgmma\.wait_group\.sync\.aligned\s+0;", "wgmma.wait_group.sync.aligned 1;", 0,
        (findings.RegisterInFlight, findings.SharedRace)),
    "products never committed": (r"wgmma\.commit_group\.sync\.aligned;", "", 0, findings.Finding),
    "no fence before the products": (r"wgmma\.fence\.sync\.aligned;", "", 0, findings.MissingWgmmaFence),
    "no release of a stage": (r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[%r\d+\+16\], %r\d+;", "", 0, findings.Deadlock),
    "no expected bytes": (
        r"mbarrier\.arrive\.expect_tx[^;]*;", "", 0, (findings.Deadlock, findings.NegativeTransactions)),
    "half the expected bytes": (r"mov\.b32 \t%r\d+, 24576;", "12288", 0, findings.NegativeTransactions),
    "one copy too few": (r"cp\.async\.bulk\.tensor\.2d\.shared::cta[^;]*;", "", 0, findings.Deadlock),
    "no barrier after the init": (r"bar\.sync \t0;", "", 0, findings.BarrierMisuse),
    "no fence after the init": (r"fence\.mbarrier_init[^;]*;", "", 0, findings.MissingInitFence),
    "no proxy fence before the store": (r"fence\.proxy\.async[^;]*;", "", 0, findings.MissingProxyFence),
    "no barrier before the store": (r"bar\.sync \t1, 256;", "", 0, (*RACES, findings.MissingProxyFence)),
    "no wait for the store": (r"cp\.async\.bulk\.wait_group\.read[^;]*;", "", 0, findings.AsyncAtExit),
    "no commit of the store": (r"cp\.async\.bulk\.commit_group;", "", 0, findings.AsyncAtExit),
    "a barrier for half of the arrivals": (r"mov\.b32 \t%r\d+, 8;", "4", 0, (findings.SharedRace, findings.Deadlock)),
}  # fmt: skip


def plant(text: str, name: str) -> str:
    pattern, replacement, which, _ = PLANTED[name]
    found = list(re.finditer(pattern, text, re.S))
    assert found, f"{pattern} is not in the PTX"
    at = found[which]
    old = at.group()
    new = re.sub(r"\d+;$", replacement + ";", old) if replacement.isdigit() else replacement
    return text[: at.start()] + new + text[at.end() :]


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug(name: str) -> None:
    kernel = captured()
    text = plant(kernel.text, name)
    with pytest.raises(PLANTED[name][3]):
        for mode in (EAGER, LATE, random_mode(1)):
            multiply(kernel, "bf16", 128, 64, 512, mode, text)


# between a fence and the products behind it: r153 is 0, r156 one of their sums, r51 written next
BEHIND_THE_FENCE = {
    "a copy": "mov.b32 %r156, %r153;",
    "a copy of a sum": "mov.b32 %r156, %r157;",
    "a copy that is read": "mov.b32 %r156, %r153; add.s32 %r51, %r156, %r153;",
    "a copy of what was copied": "mov.b32 %r156, %r153; mov.b32 %r157, %r156; add.s32 %r51, %r157, %r153;",
    "a sum that is read": "add.s32 %r51, %r156, %r153;",
    "a sum that is computed": "add.s32 %r156, %r153, %r153;",
}


@pytest.mark.parametrize("what", BEHIND_THE_FENCE)
def test_a_copy_to_sums_that_begin_anew_needs_no_fence_and_any_other_use_does(what: str) -> None:
    """Compilers copy dead values there, which ptxas leaves out."""
    kernel = captured()
    fence = "wgmma.fence.sync.aligned;"
    text = kernel.text.replace(fence, f"{fence}\n{BEHIND_THE_FENCE[what]}")
    assert text != kernel.text and "{%r156, %r157," in text
    if what in ("a copy", "a copy of a sum"):
        got, want = multiply(kernel, "bf16", 128, 64, 64, EAGER, text)
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)
    else:
        with pytest.raises(findings.MissingWgmmaFence):
            multiply(kernel, "bf16", 128, 64, 64, EAGER, text)
    with pytest.raises(findings.MissingWgmmaFence):  # the second product goes on from these sums
        multiply(kernel, "bf16", 128, 64, 512, EAGER, text)


def test_two_kernels_of_equal_argument_types_keep_their_own_text() -> None:
    a, b = captured("bf16", 2, 64, 64, 2), captured("bf16", 2, 64, 64, 3)
    assert a.text != b.text
