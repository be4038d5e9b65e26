"""Blocks that hear of each other in global memory go on in turns, in late and random modes in other orders."""

from __future__ import annotations

import numpy as np
import pytest

from composattn.emulator import findings
from composattn.emulator.cluster import EAGER, LATE, Mode, random_mode
from composattn.emulator.order import Order
from composattn.emulator.program import Program
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
    silent = Program(module(BEGIN + "st.global.b32 [%d0], %r1; atom.shared.add.u32 %r3, [smem], 1; E:", 2, shared=16))
    heard = Program(module(BEGIN + WAIT + "E:", 2))
    assert all(Order(mode, 8, silent).together == 1 for mode in MODES)
    assert Order(EAGER, 8, heard).together == 1 < Order(LATE, 8, heard).together
    assert all(2 <= Order(mode, 3, heard).together <= 3 for mode in MODES[2:])
