"""Every kind of bug with tensor memory, planted in a few lines of PTX, is found under its name; its twin runs clean."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from composattn.emulator import findings
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from tests.cpu.emulator.harness import execute, module

MODES = [EAGER, LATE, random_mode(1), random_mode(2)]

ROLE = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r0, 0; setp.eq.u32 %p3, %r1, 1;
mov.pred %p4, 0; mov.pred %p5, 1; mov.u32 %r4, smem; add.u32 %r14, %r4, 16384; shl.b32 %r2, %r1, 21;
@%p2 mbarrier.init.shared.b64 [%r14], 1;
"""
"""%p1: warp 0; %p2: thread 0; %p3: warp 1; %p4: false; %p5: true; %r14: an mbarrier; %r2: the warp's first lane."""
VISIBLE = "fence.mbarrier_init.release.cluster; bar.sync 0;"
ALLOC = """
@!%p1 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16392], {columns}; A: bar.sync 0;
ld.shared.b32 %r10, [smem+16392]; add.u32 %r11, %r10, %r2;
"""
"""%r10: the first column; %r11: the same in the warp's own lanes."""
FREE = "bar.sync 0; @!%p1 bra F; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, {columns}; F:"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
STORE = "tcgen05.st.sync.aligned.32x32b.x16.b32 [%r11], {" + ", ".join(["%r0"] * 16) + "};"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x16.b32 {" + ", ".join(f"%r{i}" for i in range(20, 36)) + "}, [%r11];"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
MEET = BEFORE + "bar.sync 0;" + AFTER
USE = "add.u32 %r50, %r20, %r35;"

# A 128 x 16 and B 16 x 16 of zeros in fp16, K contiguous, not swizzled: blocks of 8 rows and 16 bytes, in a row.
DESCRIPTORS = """
shr.u32 %r5, %r4, 4; add.u32 %r6, %r5, 512; mov.b64 %d3, {%r5, %r7}; mov.b64 %d4, {%r6, %r7};
"""
FIELDS = f"mov.u32 %r7, {8 | 1 << 14}; or.b32 %r5, %r5, {128 << 16}; or.b32 %r6, %r6, {16 << 16};"
DESCRIPTORS = DESCRIPTORS.replace("mov.b64 %d3", FIELDS + "mov.b64 %d3")
FILL = """
shl.b32 %r8, %r0, 4; add.u32 %r9, %r4, %r8; mov.u32 %r3, 0;
""" + "".join(f"st.shared.v4.b32 [%r9+{2048 * i}], {{%r3, %r3, %r3, %r3}};" for i in range(6))  # fmt: skip
PROXY = "fence.proxy.async.shared::cta;"
IDESC = 1 << 4 | 2 << 17 | 8 << 24
MMA = f"mov.u32 %r13, {IDESC}; @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r10], %d3, %d4, %r13, {{onto}};"
COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r14];"
WAIT = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r14], 0; @P bra D; bra W; D: }"


def kernel(*parts: str, columns: int = 64, visible: str = VISIBLE) -> str:
    """Allocates, does what it is told, frees."""
    frame = (ALLOC.format(columns=columns), *parts, FREE.format(columns=columns))
    return "".join((ROLE, visible, DESCRIPTORS, *frame))


def product(onto: str = "%p4", *between: str, fill: str = FILL + PROXY) -> tuple[str, ...]:
    """One multiply, waited for; `between` comes between its commit and the wait."""
    return (fill, "bar.sync 0;" + AFTER, MMA.format(onto=onto), COMMIT, *between, WAIT)


UNORDERED = (findings.TensorRace, findings.UninitialisedTensor)
OWN = (STORE, WAIT_ST, LOAD, WAIT_LD, USE)
ENDED = (AFTER, LOAD, WAIT_LD, USE)
HALF = LOAD.replace("32x32b.x16", "16x64b.x8").replace("".join(f", %r{i}" for i in range(28, 36)), "")
LEAK = FREE.format(columns=64), "bar.sync 0;"
CASES: dict[str, tuple[str, Any]] = {
    "a store and a load of one's own": (kernel(*OWN), None),
    "a load of what nobody wrote": (kernel(LOAD, WAIT_LD), findings.UninitialisedTensor),
    "a load of a store that was not waited for": (kernel(STORE, LOAD, WAIT_LD), findings.MissingTensorWait),
    "a register of a load that was not waited for": (
        kernel(STORE, WAIT_ST, LOAD, USE, WAIT_LD), findings.MissingTensorWait),
    "a register of a load that is stored before the wait": (
        kernel(STORE, WAIT_ST, LOAD, "st.shared.b32 [%r4], %r20;", WAIT_LD), findings.MissingTensorWait),
    "an address from a load that was not waited for": (
        kernel(STORE, WAIT_ST, LOAD, "ld.shared.b32 %r51, [%r20];", WAIT_LD), findings.MissingTensorWait),
    "a store over what a load may still read": (
        kernel(STORE, WAIT_ST, LOAD, STORE, WAIT_LD, WAIT_ST), findings.MissingTensorWait),
    "a store over what a load has read": (kernel(STORE, WAIT_ST, LOAD, WAIT_LD, STORE, WAIT_ST), None),
    "a store that is never waited for": (kernel(STORE), findings.MissingTensorWait),
    "lanes of another warp": (
        kernel("xor.b32 %r11, %r11, 2097152;", STORE, WAIT_ST), findings.TensorLanes),
    "the upper lanes of one's own": (
        kernel(STORE, WAIT_ST, f"add.u32 %r11, %r11, {16 << 16};", HALF, WAIT_LD), None),
    "half in the lanes of another warp": (
        kernel(STORE, WAIT_ST, f"add.u32 %r11, %r11, {16 << 16};", LOAD, WAIT_LD), findings.TensorLanes),
    "a load by part of a warp": (
        kernel(STORE, WAIT_ST, "@%p2 bra S;", LOAD, "S:", WAIT_LD), findings.CollectiveMismatch),
    "an address that differs in a warp": (
        kernel("add.u32 %r11, %r11, %r0;", STORE, WAIT_ST), findings.CollectiveMismatch),
    "a count of columns that is no power of two": (kernel(columns=48), findings.TensorAllocation),
    "fewer columns than can be had": (kernel(columns=16), findings.TensorAllocation),
    "more columns than there are": (kernel(columns=1024), findings.TensorAllocation),
    "all columns": (kernel(*OWN, columns=512), None),
    "columns that nobody allocated": (
        kernel("add.u32 %r11, %r11, 56;", STORE, WAIT_ST), findings.TensorAllocation),
    "columns behind the last": (
        kernel("add.u32 %r11, %r11, 500;", STORE, WAIT_ST, columns=512), findings.OutOfBounds),
    "columns that are not freed": (
        kernel(*OWN).replace(*LEAK), findings.TensorAllocation),
    "a use after the columns were freed": (
        kernel(*OWN) + "bar.sync 0;" + STORE + WAIT_ST, findings.TensorAllocation),
    "columns that are freed twice": (
        kernel("@!%p1 bra G; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64; G:"), findings.TensorAllocation),
    "half of what was allocated is freed": (
        kernel(*OWN).replace("b32 %r10, 64", "b32 %r10, 32"), findings.TensorAllocation),
    "columns that are freed while another warp uses them": (
        kernel(*OWN).replace("bar.sync 0; @!%p1 bra F;", "@!%p1 bra F;"),
        (findings.TensorRace, findings.TensorAllocation, findings.MissingTensorWait)),
    "an allocation with no permit": (
        kernel("@!%p1 bra R; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
               "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16400], 32; R:"),
        findings.TensorAllocation),
    "an allocation that finds no room": (
        kernel("@!%p1 bra R; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16400], 32; R:",
               columns=512), findings.Deadlock),
    "a product": (kernel(*product(), *ENDED), None),
    "a product onto what nobody wrote": (kernel(*product("%p5"), *ENDED), findings.UninitialisedTensor),
    "a product onto what was stored": (kernel(STORE, WAIT_ST, BEFORE, *product("%p5"), *ENDED), None),
    "a product onto a store that was not waited for": (
        kernel(STORE, BEFORE, *product("%p5"), *ENDED, WAIT_ST), findings.MissingTensorWait),
    "a product onto a store with no fence before the barrier": (
        kernel(STORE, WAIT_ST, *product("%p5"), *ENDED), findings.MissingTensorFence),
    "a product onto a store with no fence behind the barrier": (
        kernel(STORE, WAIT_ST, BEFORE, *product("%p5"), *ENDED).replace("bar.sync 0;" + AFTER, "bar.sync 0;"),
        findings.MissingTensorFence),
    "a product onto a store with no barrier": (
        kernel(STORE, WAIT_ST, BEFORE, *product("%p5"), *ENDED).replace("bar.sync 0;" + AFTER, AFTER),
        (*UNORDERED, findings.MissingTensorWait)),
    "a product over what another warp loads": (
        kernel(STORE, WAIT_ST, LOAD, BEFORE, *product(), *ENDED), findings.MissingTensorWait),
    "a product over what another warp has loaded": (
        kernel(STORE, WAIT_ST, LOAD, WAIT_LD, BEFORE, *product(), *ENDED), None),
    "a load that does not wait for the product": (
        kernel(*product("%p4", AFTER, LOAD, WAIT_LD)), UNORDERED),
    "a load with no fence behind the wait for the product": (
        kernel(*product(), LOAD, WAIT_LD), findings.MissingTensorFence),
    "a product that is never committed": (
        kernel(FILL, PROXY, "bar.sync 0;", MMA.format(onto="%p4")).replace(*LEAK),
        findings.AsyncAtExit),
    "a commit that nobody waits for": (
        kernel(FILL, PROXY, "bar.sync 0;", MMA.format(onto="%p4"), COMMIT).replace(*LEAK),
        findings.AsyncAtExit),
    "columns that are freed under a product": (
        kernel(FILL, PROXY, "bar.sync 0;", MMA.format(onto="%p4"), COMMIT), findings.TensorRace),
    "a wait for a product with no commit": (
        kernel(*product(), *ENDED).replace(COMMIT, ""), findings.Deadlock),
    "a commit by another thread than the product's": (
        kernel(*product()).replace(COMMIT, COMMIT.replace("@%p2", "@%p6")).replace(
            DESCRIPTORS, DESCRIPTORS + "setp.eq.u32 %p6, %r0, 1;"), (findings.TensorRace, findings.AsyncAtExit)),
    "a product by all threads of a warp": (
        kernel(*product(), *ENDED).replace("@%p2 tcgen05.mma", "@%p1 tcgen05.mma"), findings.CollectiveMismatch),
    "a product of plain stores with no fence": (
        kernel(*product(fill=FILL), *ENDED), findings.MissingProxyFence),
    "a product of what nobody wrote": (kernel(*product(fill=""), *ENDED), findings.UninitialisedShared),
    "stores over what a product may still read": (
        kernel(*product("%p4", FILL), *ENDED), findings.SharedRace),
    "stores over what a product has read": (kernel(*product(), FILL, *ENDED), None),
    "a commit of nothing": (kernel(COMMIT, WAIT), None),
    "a commit on a barrier that no fence made visible": (
        kernel(COMMIT, WAIT, visible="bar.sync 0;"), findings.MissingInitFence),
    "a descriptor of the version before": (
        kernel(*product(), *ENDED).replace(f"%r7, {8 | 1 << 14}", "%r7, 8"), findings.BadDescriptor),
    "a product of 120 columns with 128 rows": (
        kernel(*product(), *ENDED).replace(str(IDESC), str(1 << 4 | 15 << 17 | 8 << 24)), findings.BadDescriptor),
    "a product of 96 rows": (
        kernel(*product(), *ENDED).replace(str(IDESC), str(1 << 4 | 2 << 17 | 6 << 24)), findings.BadDescriptor),
}  # fmt: skip


def found_in(case: tuple[str, Any], mode: Mode, **launch: int) -> Any:
    """What pytest caught of a case's finding, which is raised; None of a case that has none."""
    body, kind = case
    with contextlib.nullcontext() if kind is None else pytest.raises(kind) as found:
        execute(module(body, threads=128, shared=16384 + 64), threads=128, mode=mode, **launch)
    return found


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_finding(name: str, mode: Mode) -> None:
    _, kind = CASES[name]
    found = found_in(CASES[name], mode)
    if kind not in (None, findings.AsyncAtExit):
        assert "PTX line" in str(found.value) or "exits with tensor memory allocated" in str(found.value)


# --- pairs of blocks ---------------------------------------------------------------------------------------

RANK = "mov.u32 %r60, %cluster_ctarank; setp.ne.u32 %p10, %r60, 0;"
"""%p10: the second block of the pair; below, %p11: thread 0 of the first."""
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
TOGETHER = BEFORE + CLUSTER + AFTER
STARTS = "@%p10 bra G; setp.eq.u32 %p11, %r0, 0; @%p11 bra H; G: setp.ne.u32 %p11, %r0, %r0; H:"
PAIR_MMA = f"mov.u32 %r13, {1 << 4 | 4 << 17 | 16 << 24}; " + MMA.split("; ")[1].replace("@%p2", "@%p11").format(
    onto="%p4"
)
BOTH = "@%p11 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r61], %h1;"
PAIR_PRODUCT = (RANK, STARTS, FILL, PROXY, CLUSTER, PAIR_MMA, "and.b32 %r61, %r14, 16777215; mov.b16 %h1, 3;", BOTH)


def pair(*parts: str) -> str:
    """What both blocks of a pair execute."""
    return kernel(*parts, CLUSTER, visible=VISIBLE + CLUSTER).replace("cta_group::1", "cta_group::2")


def folded(*parts: str) -> str:
    """A product of 128 rows: each block has 64 of them, in as many lanes twice, and half as many columns."""
    return pair(*parts).replace(str(1 << 4 | 4 << 17 | 16 << 24), str(1 << 4 | 4 << 17 | 8 << 24))


PAIRS: dict[str, tuple[str, Any]] = {
    "an allocation by both": (pair(*OWN), None),
    "a product of both": (pair(*PAIR_PRODUCT, WAIT, *ENDED), None),
    "a product that the second block loads without its barrier": (
        pair(*PAIR_PRODUCT, AFTER, LOAD, WAIT_LD, WAIT), UNORDERED),
    "stores of the second block over what the product may still read": (
        pair(*PAIR_PRODUCT, "@%p10 bra J; bra K; J:", FILL, "K:", WAIT), findings.SharedRace),
    "a product of a pair that the second block starts": (
        pair(*PAIR_PRODUCT, WAIT, *ENDED).replace("@%p10 bra G;", "@!%p10 bra G;"), findings.PairMismatch),
    "a product of 64 rows of both": (folded(*PAIR_PRODUCT, WAIT, *ENDED), None),
    "a product of 64 rows of both, taken for one whose columns go on": (
        folded(*PAIR_PRODUCT, WAIT, *ENDED).replace("}, [%r11];", "}, [%r11+1];"), findings.UninitialisedTensor),
    "counts of columns that differ": (
        pair(*OWN).replace("[smem+16392], 64;", "[smem+16392], %r62;").replace(
            DESCRIPTORS, DESCRIPTORS + RANK + "shl.b32 %r62, %r60, 5; add.u32 %r62, %r62, 32;"),
        (findings.PairMismatch, findings.TensorAllocation)),
    "an allocation that one of them skips": (
        pair(*OWN).replace("@!%p1 bra A;", RANK + "@%p10 bra E; @!%p1 bra A;") + "E:", findings.Deadlock),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_finding_of_a_pair(name: str, mode: Mode) -> None:
    found_in(PAIRS[name], mode, grid=2, cluster=2)


def test_a_pair_needs_a_cluster_of_two() -> None:
    with pytest.raises(findings.PairMismatch, match="cluster of one block"):
        execute(module(pair(*OWN), threads=128, shared=16384 + 64), threads=128)


# --- what loads and stores move ----------------------------------------------------------------------------


def held(shape: str, lane: int, register: int) -> tuple[int, int]:
    """(lane, column) that a register holds: PTX ISA, figures of the data movement shapes."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x64b":
        return lane // 4 + 8 * (lane % 2), 2 * register + lane // 2 % 2
    if shape == "16x128b":
        return lane // 4 + 8 * (register % 2), 4 * (register // 2) + lane % 4
    return lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


SHAPES = [("32x32b", 1, 1), ("32x32b", 8, 8), ("32x32b", 128, 128), ("16x64b", 4, 4), ("16x128b", 2, 4),
          ("16x256b", 1, 4), ("16x256b", 4, 16)]  # fmt: skip


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
@pytest.mark.parametrize(("shape", "repeat", "registers"), SHAPES)
def test_shapes_hold_the_lanes_and_columns_of_the_figures(
    shape: str, repeat: int, registers: int, mode: Mode, upper: bool
) -> None:
    """Tensor memory is filled lane by lane with lane * 1024 + column and read in the shape."""
    first = 16 * (upper and shape != "32x32b")
    lines = [ROLE, VISIBLE, ALLOC.format(columns=128), "and.b32 %r3, %r0, 31; shl.b32 %r3, %r3, 10;"]
    lines += [f"add.u32 %r{60 + i}, %r3, {i};" for i in range(128)]
    lines.append(f"tcgen05.st.sync.aligned.32x32b.x128.b32 [%r11], {{{', '.join(f'%r{60 + i}' for i in range(128))}}};")
    lines.append(WAIT_ST + f"add.u32 %r11, %r11, {first << 16};")
    names = ", ".join(f"%r{60 + i}" for i in range(registers))
    lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{names}}}, [%r11];" + WAIT_LD)
    lines.append(f"ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r0, {4 * registers}; add.u64 %d2, %d1, %d2;")
    lines += [f"st.global.b32 [%d2+{4 * i}], %r{60 + i};" for i in range(registers)]
    out: Any = np.zeros((128, registers), np.uint32)
    execute(
        module("".join(lines) + FREE.format(columns=128), 1, threads=128, shared=16448), [out], threads=128, mode=mode
    )
    for thread in range(128):
        for r in range(registers):
            lane, column = held(shape, thread % 32, r)
            assert out[thread, r] == (first + lane) * 1024 + column


@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
def test_halves_of_neighbouring_columns_are_packed_and_unpacked(mode: Mode) -> None:
    """A register of two halves goes to the low halves of two columns and comes back."""
    body = (ROLE, VISIBLE, ALLOC.format(columns=32), "shl.b32 %r3, %r0, 16; add.u32 %r3, %r3, 7;",
            "tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r11], {%r3};", WAIT_ST,
            "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r20, %r21}, [%r11];", WAIT_LD,
            "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r22}, [%r11];", WAIT_LD,
            "ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r0, 12; add.u64 %d2, %d1, %d2;",
            *(f"st.global.b32 [%d2+{4 * i}], %r{20 + i};" for i in range(3)), FREE.format(columns=32))  # fmt: skip
    out: Any = np.zeros((128, 3), np.uint32)
    execute(module("".join(body), 1, threads=128, shared=16448), [out], threads=128, mode=mode)
    thread = np.arange(128)
    np.testing.assert_array_equal(out, np.stack([0 * thread + 7, thread, thread << 16 | 7], 1))


@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
@pytest.mark.parametrize(("fold", "want"), [("max", np.max), ("min", np.min)])
def test_a_load_that_reduces_gives_the_values_and_the_largest(fold: str, want: Any, mode: Mode) -> None:
    body = (ROLE, VISIBLE, ALLOC.format(columns=32), "cvt.rn.f32.u32 %r3, %r0;",
            *(f"mul.f32 %r{20 + i}, %r3, 0f{bits:08X};" for i, bits in enumerate((0x3F800000, 0xC0000000))),
            "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r20, %r21};", WAIT_ST,
            f"tcgen05.ld.red.sync.aligned.32x32b.x2.{fold}.f32 {{%r20, %r21}}, %r22, [%r11];", WAIT_LD,
            "ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r0, 12; add.u64 %d2, %d1, %d2;",
            *(f"st.global.b32 [%d2+{4 * i}], %r{20 + i};" for i in range(3)), FREE.format(columns=32))  # fmt: skip
    out: Any = np.zeros((128, 3), np.float32)
    execute(module("".join(body), 1, threads=128, shared=16448), [out], threads=128, mode=mode)
    values = np.stack([np.arange(128), -2 * np.arange(128)], 1).astype(np.float32)
    np.testing.assert_array_equal(out[:, :2], values)
    np.testing.assert_array_equal(out[:, 2], want(values, 1))
