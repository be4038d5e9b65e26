"""Blocks that hear of each other in global memory go on in turns, in late and random modes in other orders."""

from __future__ import annotations

import numpy as np
import pytest

from composattn.emulator import findings
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.order import Order
from composattn.emulator.program import PtxProgram
from tests.cpu.emulator.harness import execute, module

MODES = [EAGER, LATE, *(random_mode(seed) for seed in range(1, 5))]
BEGIN = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
setp.ne.u32 %p0, %r0, 0; @%p0 bra E;
"""
WAIT = "W: ld.acquire.gpu.global.b32 %r2, [%d1]; setp.ne.u32 %p1, %r2, %r1; @%p1 bra W;"
COME = """
fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 %r3, [%d1], 1; mul.wide.u32 %d4, %r3, 4; add.u64 %d0, %d0, %d4;
st.global.b32 [%d0], %r1; E:
"""
BLOCKS = 8


def come(body: str, mode: Mode, sms: int = 132, blocks: int = BLOCKS) -> list[int]:
    """Numbers of blocks in the order in which they come to the counter."""
    out, turn = np.zeros(blocks, np.uint32), np.zeros(1, np.uint32)
    execute(module(BEGIN + body, 2), [out, turn], grid=blocks, mode=mode, sms=sms)
    return out.tolist()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_who_waits_for_a_turn_comes_in_order(mode: Mode) -> None:
    assert come(WAIT + COME, mode) == list(range(BLOCKS))


def test_who_does_not_wait_comes_in_any_order() -> None:
    assert come(COME, EAGER) == list(range(BLOCKS))
    found = [tuple(come(COME, mode)) for mode in MODES]
    assert len(set(found)) == len(MODES), found
    assert found[1].index(3) < found[1].index(0), "the last of those under way goes on in late mode"


@pytest.mark.parametrize("mode", MODES[:3], ids=str)
def test_a_block_may_wait_for_those_that_start_later_if_they_have_room(mode: Mode) -> None:
    """Each waits until all have come."""
    meet = f"red.relaxed.gpu.global.add.s32 [%d1], 1; {WAIT.replace('ne.u32 %p1, %r2, %r1', 'lt.u32 %p1, %r2, 3')} E:"
    come(meet, mode, sms=3, blocks=3)
    with pytest.raises(findings.Livelock, match="all blocks spin"):
        come(meet, mode, sms=2, blocks=3)


def test_blocks_that_hear_of_nobody_run_one_after_the_other() -> None:
    silent = PtxProgram(
        module(BEGIN + "st.global.b32 [%d0], %r1; atom.shared.add.u32 %r3, [smem], 1; E:", 2, shared=16)
    )
    heard = PtxProgram(module(BEGIN + WAIT + "E:", 2))
    assert all(Order(mode, 8, silent).together == 1 for mode in MODES)
    assert Order(EAGER, 8, heard).together == 1 < Order(LATE, 8, heard).together
    assert all(2 <= Order(mode, 3, heard).together <= 3 for mode in MODES[2:])


# --- what another warp waits for comes about ---------------------------------------------------------------

WARP = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r0, 0;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
"""
UNTIL_SET = "W: ld.acquire.gpu.global.b32 %r2, [%d1]; setp.eq.u32 %p4, %r2, 0; @%p4 bra W;"
SET = "@%p2 red.release.gpu.global.add.u32 [%d1], 1;"
COPIED = """
@%p2 mbarrier.init.shared.b64 [smem+4096], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+4096], 256;
@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [smem], [%d0], 256, [smem+4096];
"""
ARRIVED = "V: mbarrier.try_wait.parity.shared.b64 %p5, [smem+4096], 0; @%p5 bra D; bra V; D:"


def one_block(body: str, mode: Mode, threads: int = 64) -> None:
    given, flag = np.arange(64, dtype=np.uint32), np.zeros(1, np.uint32)
    execute(module(WARP + body, 2, threads=threads, shared=8192), [given, flag], threads=threads, mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_copy_that_one_warp_waits_for_ends_while_another_spins(mode: Mode) -> None:
    """It spins until the one that waits has set a flag."""
    one_block(f"{COPIED} @%p1 bra S; {UNTIL_SET} bra E; S: {ARRIVED} {SET} E:", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_who_does_not_spin_goes_on(mode: Mode) -> None:
    """A thread goes on even where its path joins the spinning one's before the flag is set."""
    one_block(f"@%p1 bra M; {UNTIL_SET} M: {SET}", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_warps_in_step_that_wait_for_different_barriers_part_as_often_as_they_must(mode: Mode) -> None:
    """Warp 0 finds two phases over, one after the other, and then ends those that the others wait for."""
    bars = "".join(f"@%p2 mbarrier.init.shared.b64 [smem+{4096 + 8 * n}], 1;" for n in range(6))
    over = "".join(f"@%p2 mbarrier.arrive.shared.b64 %d9, [smem+{4096 + 8 * n}];" for n in (0, 1, 2))
    others = "".join(f"mbarrier.arrive.shared.b64 %d9, [smem+{4096 + 8 * n}];" for n in (3, 4, 5))

    def wait(name: str) -> str:
        return f"{name}: mbarrier.try_wait.parity.shared.b64 %p5, [%r5], 0; @%p5 bra {name}D; bra {name}; {name}D:"

    # warps 0 to 2 wait for barrier 0 and warp 3 for 5, then 0 and 1 for 1 and warp 2 for 4, then warp 0 for 2, 1 for 3
    steps = ""
    for step in range(3):
        steps += f"setp.ge.u32 %p6, %r1, {3 - step}; mov.u32 %r5, smem; add.u32 %r5, %r5, {4096 + 8 * step};"
        steps += f"@%p6 add.u32 %r5, %r5, {8 * (5 - 2 * step)}; {wait(f'W{step}')}"
        steps += "@%p6 bra E;"
    body = f"{bars} fence.mbarrier_init.release.cluster; bar.sync 0; {over} bar.sync 0; {steps} @%p2 bra L; bra E;"
    one_block(f"{body} L: {others} E:", mode, 128)


@pytest.mark.parametrize("mode", MODES[:3], ids=str)
@pytest.mark.parametrize("counts", [SET, "@%p2 atom.relaxed.gpu.global.add.s32 %r2, [%d1], 1;", UNTIL_SET])
def test_a_count_that_nobody_has_set_is_found(counts: str, mode: Mode) -> None:
    """Memory of launches is poisoned where results are checked."""
    memory = np.full(1, np.nan, np.float32)
    given = [np.arange(64, dtype=np.uint32), memory]
    with pytest.raises(findings.UninitialisedGlobal, match="bytes into array 1"):
        execute(module(WARP + counts, 2, threads=64), given, threads=64, mode=mode)
    execute(module(f"{WARP} @%p2 st.global.b32 [%d1], 1; bar.sync 0; {counts}", 2, threads=64), given, threads=64)
    execute(module(f"{WARP} @%p2 red.global.add.f32 [%d1], 0f3f800000;", 2, threads=64), given, threads=64, mode=mode)


WAITS = {
    "asks again": "A: ld.acquire.gpu.global.u32 %r2, [%d1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra A;",
    "sleeps": "A: nanosleep.u32 500; ld.relaxed.gpu.global.u32 %r2, [%d1]; setp.ne.u32 %p2, %r2, 0; @!%p2 bra A;",
}


@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
@pytest.mark.parametrize("how", WAITS)
def test_a_warp_that_waits_for_a_number_lets_the_others_go_on(how: str, mode: Mode) -> None:
    """It would ask a thousand times first: a third of what emulated backwards in a fixed order took."""
    begin = "mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; ld.param.u64 %d1, [p0]; setp.eq.u32 %p1, %r1, 1; @%p1 bra SET;"
    body = f"{begin} {WAITS[how]} bra OUT; SET: mov.u32 %r3, 1; st.release.gpu.global.u32 [%d1], %r3; OUT:"
    flag = np.zeros(1, np.uint32)
    result = execute(module(body, 1, threads=64), [flag], threads=64, mode=mode)
    assert flag[0] == 1 and result.instructions < 100
