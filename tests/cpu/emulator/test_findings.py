"""Every kind of bug, planted in a few lines of PTX, is found under its name; the same lines without it run clean."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from composattn.emulator import findings
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from tests.cpu.emulator.harness import execute, module

MODES = [EAGER, LATE, random_mode(1), random_mode(2)]

ROLE = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31;
setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r0, 0; setp.eq.u32 %p3, %r2, 0;
shl.b32 %r3, %r0, 2; mov.u32 %r4, smem; add.u32 %r5, %r4, %r3;
"""
"""%p1: warp 0; %p2: thread 0; %p3: first lane; %r5: a word of shared memory for each thread."""

ONE = "@%p2 mbarrier.init.shared.b64 [smem+4096], 1;"
FENCE = "fence.mbarrier_init.release.cluster;"
INIT = ONE.replace("1;", "{count};") + FENCE + "bar.sync 0;"
WAIT = """
{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [smem+4096], {parity}; @P bra D; bra W; D: }}
"""
LOAD = """
ld.param.u64 %d1, [p0];
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+4096], {expect};
@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [smem], [%d1], {bytes}, [smem+4096];
"""
STORE = """
ld.param.u64 %d2, [p1];
@%p2 cp.async.bulk.global.shared::cta.bulk_group [%d2], [smem], 256;
@%p2 cp.async.bulk.commit_group;
"""

COPY = """
ld.param.u64 %d1, [p0]; shl.b32 %r7, %r0, 4; add.u32 %r8, %r4, %r7; cvt.u64.u32 %d3, %r7; add.u64 %d4, %d1, %d3;
cp.async.cg.shared.global [%r8], [%d4], 16, {size};
"""
"""16 bytes a thread, of which so many are read."""
COMMIT = "cp.async.commit_group;"
WAIT_FOR = "cp.async.wait_group {still};"
READ_COPIED = "ld.shared.b32 %r6, [%r8];"

READ = "ld.shared.b32 %r6, [%r5];"
WRITE = "st.shared.b32 [%r5], %r0;"

# What runs, what it must be found to be (None: clean), in words.
# A read that races with a write is one of never written memory where the schedule puts it first.
UNORDERED = (findings.SharedRace, findings.UninitialisedShared)
CASES: dict[str, tuple[str, Any]] = {
    "a read of memory never written": (READ, findings.UninitialisedShared),
    "a write and a read of one's own": (WRITE + READ, None),
    "a write by one warp read by another after a barrier": (
        f"@%p1 {WRITE} bar.sync 0; xor.b32 %r5, %r5, 0; ld.shared.b32 %r6, [smem];", None),
    "a write by one warp read by another with no barrier": (
        f"@%p1 {WRITE} @!%p1 ld.shared.b32 %r6, [smem];", UNORDERED),
    "a write over what another warp reads": (
        f"@%p1 {WRITE} bar.sync 0; @!%p1 ld.shared.b32 %r6, [smem]; @%p1 {WRITE}", findings.SharedRace),
    "two warps writing one word": ("st.shared.b32 [smem], %r0;", findings.SharedRace),
    "a shared address behind the end": ("@%p2 st.shared.b32 [smem+1048576], %r0;", findings.OutOfBounds),
    "a shared address before the start": ("@%p2 st.shared.b32 [4], %r0;", findings.OutOfBounds),
    "a misaligned shared address": ("@%p2 st.shared.b32 [smem+2], %r0;", findings.Misaligned),
    "a misaligned global address": ("ld.param.u64 %d1, [p0]; ld.global.b32 %r6, [%d1+2];", findings.Misaligned),
    "a global address behind a tensor": (
        "ld.param.u64 %d1, [p0]; ld.global.b32 %r6, [%d1+1048576];", findings.OutOfBounds),
    "a global address before a tensor": (
        "ld.param.u64 %d1, [p0]; ld.global.b32 %r6, [%d1+-8192];", findings.OutOfBounds),
    "a copy that is waited for": (
        INIT.format(count=1) + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0) + READ, None),
    "a copy that is read while in flight": (
        INIT.format(count=1) + LOAD.format(expect=256, bytes=256) + READ, UNORDERED),
    "a copy over what is still read": (
        WRITE + "fence.proxy.async.shared::cta;" + INIT.format(count=1) + READ + LOAD.format(expect=256, bytes=256)
        + WAIT.format(parity=0),
        findings.SharedRace),
    "more bytes than were expected": (
        INIT.format(count=1) + LOAD.format(expect=128, bytes=256) + WAIT.format(parity=0),
        findings.NegativeTransactions),
    "fewer bytes than were expected": (
        INIT.format(count=1) + LOAD.format(expect=512, bytes=256) + WAIT.format(parity=0), findings.Deadlock),
    "an arrival too many": (
        INIT.format(count=1) + "mbarrier.arrive.shared.b64 %d9, [smem+4096];", findings.BarrierOverArrival),
    "an arrival too few": (
        INIT.format(count=2) + "@%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096];" + WAIT.format(parity=0),
        findings.Deadlock),
    "the wrong parity": (
        INIT.format(count=1) + "@%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096];" + WAIT.format(parity=0)
        + "bar.sync 0;"
        + WAIT.format(parity=0), None),
    "a phase too far": (
        INIT.format(count=1) + "@%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096];" + WAIT.format(parity=0)
        + WAIT.format(parity=1), findings.Deadlock),
    "a barrier that was never initialised": (WAIT.format(parity=0), findings.BarrierMisuse),
    "a barrier used before its init is known": (
        "@%p2 mbarrier.init.shared.b64 [smem+4096], 1; @%p1 bra S; bar.warp.sync -1;" + WAIT.format(parity=1) + "S:",
        findings.BarrierMisuse),
    "a barrier initialised again while in use": (
        INIT.format(count=2) + "@%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096]; "
        "@%p2 mbarrier.init.shared.b64 [smem+4096], 2;", findings.BarrierMisuse),
    "a copy on a barrier whose init no fence made visible": (
        ONE + "bar.sync 0;" + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0) + READ,
        findings.MissingInitFence),
    "a copy on a barrier whose fence came before its init": (
        FENCE + ONE + "bar.sync 0;" + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0) + READ,
        findings.MissingInitFence),
    "a copy on a barrier that another warp fenced": (
        ONE + "bar.sync 0; @%p1 bra S;" + FENCE + "S: bar.sync 0;" + LOAD.format(expect=256, bytes=256)
        + WAIT.format(parity=0) + READ, findings.MissingInitFence),
    "a copy on a barrier initialised again with no fence": (
        INIT.format(count=1) + ONE + "bar.sync 0;" + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0) + READ,
        findings.MissingInitFence),
    "a copy on a barrier made visible by a proxy fence": (
        ONE + "fence.proxy.async.shared::cta; bar.sync 0;" + LOAD.format(expect=256, bytes=256)
        + WAIT.format(parity=0) + READ, None),
    "arrivals alone, with no fence of the init": (
        ONE + "bar.sync 0; @%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096];" + WAIT.format(parity=0), None),
    "a barrier read as plain memory": (
        INIT.format(count=1) + "ld.shared.b32 %r6, [smem+4096];", findings.BarrierMisuse),
    "a barrier written as plain memory": (
        INIT.format(count=1) + "@%p2 st.shared.b32 [smem+4100], %r0;", findings.BarrierMisuse),
    "a barrier under a copy": (
        INIT.format(count=1) + LOAD.format(expect=256, bytes=256).replace("[smem],", "[smem+3968],"),
        findings.BarrierMisuse),
    "plain memory where a barrier was invalidated": (
        INIT.format(count=1) + "@%p2 mbarrier.inval.shared.b64 [smem+4096];"
        "@%p2 st.shared.b32 [smem+4096], %r0;", None),
    "a barrier invalidated while in use": (
        INIT.format(count=2) + "@%p2 mbarrier.arrive.shared.b64 %d9, [smem+4096];"
        "@%p2 mbarrier.inval.shared.b64 [smem+4096];", findings.BarrierMisuse),
    "a barrier used after it was invalidated": (
        INIT.format(count=1) + "@%p2 mbarrier.inval.shared.b64 [smem+4096]; bar.sync 0;" + WAIT.format(parity=0),
        findings.BarrierMisuse),
    "a barrier over what another warp still reads": (
        WRITE + "bar.sync 0; @!%p1 ld.shared.b32 %r6, [smem]; @%p2 mbarrier.init.shared.b64 [smem], 1;",
        findings.SharedRace),
    "a numbered barrier beyond the last": ("bar.sync 16, 64;", findings.BarrierMisuse),
    "a copy over plain stores with no fence": (
        INIT.format(count=1) + WRITE + "bar.sync 0;" + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0)
        + READ, findings.MissingProxyFence),
    "a copy over plain stores that were fenced": (
        INIT.format(count=1) + WRITE + "fence.proxy.async.shared::cta; bar.sync 0;"
        + LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0) + READ, None),
    "a misaligned barrier": ("@%p2 mbarrier.init.shared.b64 [smem+4092], 1;", findings.Misaligned),
    "a bulk store of fenced plain stores": (
        WRITE + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE + "cp.async.bulk.wait_group.read 0;", None),
    "a bulk store of plain stores with no fence": (
        WRITE + "bar.sync 0;" + STORE + "cp.async.bulk.wait_group.read 0;", findings.MissingProxyFence),
    "a bulk store whose fence comes before the stores": (
        "fence.proxy.async.shared::cta;" + WRITE + "bar.sync 0;" + STORE + "cp.async.bulk.wait_group.read 0;",
        findings.MissingProxyFence),
    "a fence by the thread that starts the store": (
        WRITE + "bar.sync 0; fence.proxy.async.shared::cta;" + STORE + "cp.async.bulk.wait_group.read 0;", None),
    "a bulk store with no barrier": (
        WRITE + "fence.proxy.async.shared::cta;" + STORE + "cp.async.bulk.wait_group.read 0;", UNORDERED),
    "a write over what a bulk store reads": (
        WRITE + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE + WRITE + "cp.async.bulk.wait_group.read 0;",
        findings.SharedRace),
    "a write after a bulk store was waited for": (
        WRITE + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE
        + "cp.async.bulk.wait_group.read 0; bar.sync 0;" + WRITE,
        None),
    "an exit with a bulk store in flight": (
        WRITE + "fence.proxy.async.shared::cta; bar.sync 0;" + STORE, findings.AsyncAtExit),
    "a misaligned bulk copy": (
        INIT.format(count=1) + LOAD.format(expect=256, bytes=248), findings.Misaligned),
    "a copy behind the end of its tensor": (
        INIT.format(count=1) + LOAD.format(expect=2048, bytes=2048), findings.OutOfBounds),
    "a shuffle of lanes that are not there": (
        "@%p3 bra S; shfl.sync.idx.b32 %r6, %r0, 0, 31, -1; S:", findings.CollectiveMismatch),
    "a shuffle among the lanes that are there": (
        "@%p3 bra S; shfl.sync.idx.b32 %r6, %r0, 1, 31, -2; S:", None),
    "an elect under divergence": ("@%p3 bra S; elect.sync %r6|%p9, -1; S:", findings.CollectiveMismatch),
    "a vote under divergence": ("@%p3 bra S; vote.sync.any.pred %p9, %p3, -1; S:", findings.CollectiveMismatch),
    "a barrier with two thread counts": (
        "@%p1 bra S; bar.sync 1, 64; bra E; S: bar.sync 1, 32; E:", findings.Finding),
    "a barrier that one warp skips": ("@%p1 bra E; bar.sync 1, 64; E:", findings.Deadlock),
    "a barrier that tells all warps what holds for one thread, and then for none": (
        f"barrier.cta.red.or.pred %p9, 1, 64, %p2; @!%p9 {READ}"
        f"setp.ne.u32 %p8, %r0, %r0; barrier.cta.red.or.pred %p9, 1, 64, %p8; @%p9 {READ}", None),
    "a barrier that asks, and one warp skips": (
        "@%p1 bra E; barrier.cta.red.or.pred %p9, 1, 64, %p2; E:", findings.Deadlock),
    "a thread count that is no multiple of a warp": ("bar.sync 1, 40;", findings.CollectiveMismatch),
    "two barriers taken in opposite order": (
        "@%p1 bra S; bar.sync 1, 64; bar.sync 2, 64; bra E; S: bar.sync 2, 64; bar.sync 1, 64; E:", findings.Deadlock),
    "a flag that nobody sets": (
        "ld.param.u64 %d1, [p0]; W: ld.acquire.gpu.global.b32 %r6, [%d1]; setp.ne.u32 %p9, %r6, 12345; @%p9 bra W;",
        findings.Livelock),
    "a group of a lane's copies that is waited for": (
        COPY.format(size=16) + COMMIT + WAIT_FOR.format(still=0) + READ_COPIED, None),
    "all of a lane's copies waited for with no group": (
        COPY.format(size=16) + "cp.async.wait_all;" + READ_COPIED, None),
    "a lane's copy that is read while in flight": (COPY.format(size=16) + COMMIT + READ_COPIED, UNORDERED),
    "a lane's copy in a group that may still be on its way": (
        COPY.format(size=16) + COMMIT + WAIT_FOR.format(still=1) + READ_COPIED, UNORDERED),
    "a lane's copy that belongs to no group when it is waited for": (
        COPY.format(size=16) + WAIT_FOR.format(still=0) + READ_COPIED, UNORDERED),
    "an older group of copies, with a younger one on its way": (
        COPY.format(size=16) + COMMIT + COPY.format(size=16).replace("[%r8],", "[%r8+2048],") + COMMIT
        + WAIT_FOR.format(still=1) + READ_COPIED, None),
    "copies of other warps behind a barrier": (
        COPY.format(size=16) + COMMIT + WAIT_FOR.format(still=0) + "bar.sync 0; ld.shared.b32 %r6, [smem];", None),
    "copies of other warps with no barrier": (
        COPY.format(size=16) + COMMIT + WAIT_FOR.format(still=0) + "xor.b32 %r9, %r8, 512; ld.shared.b32 %r6, [%r9];",
        UNORDERED),
    "copies of other warps behind a barrier that comes before they are waited for": (
        COPY.format(size=16) + COMMIT + "bar.sync 0;" + WAIT_FOR.format(still=0)
        + "xor.b32 %r9, %r8, 512; ld.shared.b32 %r6, [%r9];", UNORDERED),
    "a lane's copy over what another warp reads": (
        WRITE + "bar.sync 0; xor.b32 %r9, %r5, 128; ld.shared.b32 %r6, [%r9];" + COPY.format(size=16),
        findings.SharedRace),
    "a second copy over one that is on its way": (
        COPY.format(size=16) + COMMIT + COPY.format(size=16), findings.SharedRace),
    "a lane's copy behind the end of its tensor": (
        COPY.format(size=16).replace("[%d4]", "[%d4+1048576]"), findings.OutOfBounds),
    "a lane's copy of nothing from nowhere": (
        COPY.format(size=0).replace("[%d4]", "[%d4+1048576]") + COMMIT + WAIT_FOR.format(still=0) + READ_COPIED, None),
    "a lane's copy from a misaligned address": (COPY.format(size=16).replace("[%d4]", "[%d4+8]"), findings.Misaligned),
    "a group that some lanes of a warp make": (
        COPY.format(size=16) + "@%p2 " + COMMIT, findings.CollectiveMismatch),
    "registers asked for in no multiple of 8": ("setmaxnreg.dec.sync.aligned.u32 41;", None),
}  # fmt: skip
BAD_FORMS = ["registers asked for in no multiple of 8"]


def launch(body: str, mode: Mode) -> None:
    source = np.arange(256, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    execute(module(ROLE + body, 2, threads=64, shared=8192), [source, out], threads=64, mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if n not in BAD_FORMS])
def test_finding(name: str, mode: Mode) -> None:
    body, kind = CASES[name]
    if kind is None:
        launch(body, mode)
        return
    with pytest.raises(kind) as found:
        launch(body, mode)
    assert "PTX line" in str(found.value)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_copy_over_what_was_read_wants_a_fence_where_a_mode_looks_for_it(mode: Mode) -> None:
    fence, strict = "fence.proxy.async.shared::cta;", dataclasses.replace(mode, fenced_reads=True)

    def body(between: str) -> str:
        copied = LOAD.format(expect=256, bytes=256) + WAIT.format(parity=0)
        return WRITE + fence + INIT.format(count=1) + READ + between + "bar.sync 0;" + copied

    launch(body(""), mode)
    launch(body(fence), strict)
    with pytest.raises(findings.MissingProxyFence, match="read by plain loads of warp"):
        launch(body(""), strict)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("resident", "producers", "consumers", "kind"),
    [
        (4, "dec.sync.aligned.u32 24", "inc.sync.aligned.u32 104", None),
        (5, "dec.sync.aligned.u32 24", "inc.sync.aligned.u32 104", "together, it has 12288|waits for 104 registers"),
        (4, None, "inc.sync.aligned.u32 104", "waits for 104 registers per thread; the block has 16384"),
        (4, "dec.sync.aligned.u32 24", None, None),
        (4, "dec.sync.aligned.u32 104", None, "dec to 104 registers by a warp that has 64"),
        (4, "inc.sync.aligned.u32 40", "inc.sync.aligned.u32 64", "inc to 40 registers by a warp that has 64"),
    ],
)  # fmt: skip
def test_roles_share_the_registers_that_a_block_has(
    resident: int, producers: str | None, consumers: str | None, kind: str | None, mode: Mode
) -> None:
    """Two warpgroups of 24 and 104 registers per thread: a quarter of an SM's, 64 per thread at launch."""
    asks = ["" if role is None else f"setmaxnreg.{role};" for role in (producers, consumers)]
    body = f"mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 128; @%p1 bra S; {asks[0]} bra E; S: {asks[1]} E:"
    text = module(body, threads=256).replace(".reqntid 256, 1, 1", f".reqntid 256, 1, 1\n.minnctapersm {resident}")
    if kind is None:
        execute(text, threads=256, mode=mode)
        return
    with pytest.raises((findings.RegistersExhausted, findings.Deadlock), match=kind):
        execute(text, threads=256, mode=mode)


def test_a_warpgroup_asks_for_registers_as_a_whole() -> None:
    body = "mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 32; @%p1 bra E; setmaxnreg.dec.sync.aligned.u32 24; E:"
    with pytest.raises(findings.Deadlock, match="the other warps of its warpgroup at setmaxnreg"):
        execute(module(body, threads=128), threads=128)


def test_a_deadlock_names_what_every_warp_waits_for() -> None:
    with pytest.raises(findings.Deadlock) as found:
        launch("@%p1 bra S; bar.sync 1, 64; bra E; S: bar.sync 2, 64; E:", EAGER)
    text = str(found.value)
    assert "warp 0 waits for barrier 2: 32 of 64 threads" in text
    assert "warp 1 waits for barrier 1: 32 of 64 threads" in text


def test_a_race_names_both_sides() -> None:
    with pytest.raises(findings.SharedRace) as found:
        launch(INIT.format(count=1) + LOAD.format(expect=256, bytes=256) + READ, EAGER)
    assert "a copy that completes on mbarrier" in str(found.value)
    assert "ld.shared.b32" in str(found.value)


def test_an_unknown_instruction_is_refused_with_its_line() -> None:
    for body in (
        "tex.1d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [p0, {%r5}];",
        "add.s128 %r1, %r2, %r3;",
        "ld.const.b32 %r1, [p0];",
    ):
        with pytest.raises(findings.UnknownInstruction) as found:
            launch(body, EAGER)
        assert "PTX line" in str(found.value)


def test_register_counts_outside_the_rule_are_refused() -> None:
    with pytest.raises(findings.UnknownInstruction):
        launch(CASES[BAD_FORMS[0]][0], EAGER)


def test_blocks_that_wait_for_each_other_run_together() -> None:
    """A block spins until the next one, in launch order, has set a flag."""
    body = """
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %nctaid.x; add.u32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, %r1;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r2, 4; add.u64 %d2, %d1, %d2;
    mul.wide.u32 %d3, %r0, 4; add.u64 %d3, %d1, %d3;
    @%p1 bra S;
    W: ld.acquire.gpu.global.b32 %r6, [%d2]; setp.eq.u32 %p9, %r6, 0; @%p9 bra W;
    S: st.release.gpu.global.b32 [%d3], 1;
    """
    flags: Any = np.zeros(5, np.uint32)
    execute(module(body, 1), [flags], grid=5)
    assert flags.all()
