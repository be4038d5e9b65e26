"""Kernels that start before the one before them is over must wait before they use what it writes."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from composattn.emulator import findings
from composattn.emulator.capture import Captured
from composattn.emulator.launch import Stream
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.tensormap import TensorMap
from tests.cpu.emulator.harness import execute, module

MODES = [EAGER, LATE, random_mode(1), random_mode(2)]
WAIT = "griddepcontrol.wait;"
ADDRESS = "mov.u32 %r0, %tid.x; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r0, 4; add.u64 %d2, %d1, %d2;"
WRITE = ADDRESS + "st.global.b32 [%d2], %r0;"
READ = ADDRESS + "ld.global.b32 %r1, [%d2];"
ADD = ADDRESS + "red.global.add.u32 [%d2], %r0;"
BARRIER = """
setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared.b64 [smem+4096], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
@%p2 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+4096], 128;
"""
ARRIVED = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [smem+4096], 0; @P bra D; bra W; D: }"
COPY = f"""{ADDRESS} {BARRIER}
@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [smem], [%d1], 128, [smem+4096]; {ARRIVED}
"""
TENSOR_COPY = f"""mov.u32 %r0, %tid.x; mov.u64 %d3, m0; mov.b32 %r2, 0; {BARRIER}
@%p2 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [smem], [%d3, {{%r2, %r2}}],
[smem+4096]; {ARRIVED}
"""


def in_order(bodies: list[str], mode: Mode = EAGER, other: bool = False) -> None:
    """Runs kernels on one array (the last on another one) as a stream of launches that start early."""
    stream, data, apart = Stream(), np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)
    for i, body in enumerate(bodies):
        array = apart if other and i == len(bodies) - 1 else data
        threads = 64 if "%p1" in body else 32
        of_tensor = "m0" in body
        box = TensorMap(array.ctypes.data, "u32", 4, (16, 2), (4, 64), (16, 2))
        text = module(body, 0 if of_tensor else 1, maps=int(of_tensor), threads=threads, shared=8192)
        if of_tensor:
            text = text.replace(".param .align 64 .b8 m0[128]", ".param .align 64 .b8 m0[128], .param .u64 p0")
        execute(text, [array], maps=[box] if of_tensor else [], threads=threads, mode=mode, stream=stream)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("use", [READ, WRITE, ADD, COPY, TENSOR_COPY], ids=["ld", "st", "red", "copy", "tensor copy"])
def test_what_the_kernel_before_writes_is_waited_for(use: str, mode: Mode) -> None:
    in_order([WRITE, WAIT + use], mode)
    with pytest.raises(findings.MissingGridWait, match="into array 0"):
        in_order([WRITE, use], mode)


@pytest.mark.parametrize("body", [READ, COPY], ids=["ld", "copy"])
def test_what_it_does_not_write_needs_no_wait(body: str) -> None:
    in_order([WRITE, body], other=True)
    in_order([READ, body])


def test_a_wait_behind_the_read_is_too_late() -> None:
    with pytest.raises(findings.MissingGridWait):
        in_order([WRITE, READ + WAIT])


def test_one_warp_waits_for_others_through_a_barrier() -> None:
    roles = "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; @!%p1 bra S;" + WAIT + "S:"
    in_order([WRITE, roles + "bar.sync 0;" + READ])
    with pytest.raises(findings.MissingGridWait):
        in_order([WRITE, roles + READ])


def test_a_kernel_that_does_not_wait_leaves_those_before_it_unfinished() -> None:
    in_order([WRITE, WAIT, READ])
    for read in (READ, WAIT + READ):
        with pytest.raises(findings.MissingGridWait, match="that the one before has not waited for"):
            in_order([WRITE, "", read])


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_function_says_that_a_kernel_starts_early(waits: bool) -> None:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from tests.cpu.emulator.early_kernel import Early

    data = torch.zeros(64, dtype=torch.int32)
    tensor = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), stride=(1,), assumed_align=4)
    kernel = Captured(Early(waits), (tensor, make_fake_stream()))
    launches: list[Any] = [kernel.launch(data) for _ in range(2)]
    assert all(launch.early for launch in launches)
    stream = Stream()
    stream.run(kernel.program, launches[0])
    if waits:
        stream.run(kernel.program, launches[1])
        assert data.tolist() == [2] * 64
        return
    with pytest.raises(findings.MissingGridWait):
        stream.run(kernel.program, launches[1])
