"""Clusters: shared memory of the other block, multicast copies, remote arrivals, the cluster's barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from composattn.emulator import findings
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.tensormap import TensorMap
from tests.cpu.emulator.harness import execute, module

MODES = [EAGER, LATE, random_mode(1), random_mode(2)]
BEGIN = """
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, smem; shl.b32 %r4, %r0, 2;
add.u32 %r5, %r3, %r4; mapa.shared::cluster.u32 %r6, %r5, %r2; mapa.shared::cluster.u32 %r7, %r3, %r2;
setp.eq.u32 %p1, %r0, 0; mad.lo.u32 %r8, %r1, 1000, %r0; ld.param.u64 %d1, [p0];
mad.lo.u32 %r9, %r1, 32, %r0; mul.wide.u32 %d2, %r9, 4; add.u64 %d2, %d1, %d2;
"""
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
WAIT = "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [smem+4096], 0; @P bra D; bra W; D: }"


def run(body: str, mode: Mode, extra: Any = (), maps: Any = ()) -> Any:
    out = np.zeros(64, np.uint32)
    text = module(BEGIN + body, 1 + len(extra), maps=len(maps), shared=8192)
    execute(text, [out, *extra], maps=list(maps), grid=2, cluster=2, mode=mode)
    return out


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_block_reads_what_the_other_wrote_into_its_memory(mode: Mode) -> None:
    out = run(f"st.shared::cluster.b32 [%r6], %r8; {MEET} ld.shared.b32 %r10, [%r5]; st.global.b32 [%d2], %r10;", mode)
    assert out.tolist() == [1000 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_block_reads_from_the_other(mode: Mode) -> None:
    body = f"st.shared.b32 [%r5], %r8; {MEET} ld.shared::cluster.b32 %r10, [%r6]; st.global.b32 [%d2], %r10; {MEET}"
    assert run(body, mode).tolist() == [1000 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_read_of_the_other_block_needs_the_barrier(mode: Mode) -> None:
    with pytest.raises((findings.SharedRace, findings.UninitialisedShared)):
        run("st.shared.b32 [%r5], %r8; ld.shared::cluster.b32 %r10, [%r6];", mode)


RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
READ_OTHER = "ld.shared::cluster.b32 %r10, [%r6]; st.global.b32 [%d2], %r10;"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("fence", ["", "fence.acq_rel.cta;", "fence.mbarrier_init.release.cluster;"])
def test_a_relaxed_arrival_orders_no_stores(fence: str, mode: Mode) -> None:
    with pytest.raises(findings.SharedRace):
        run(f"st.shared.b32 [%r5], %r8; {fence} {RELAXED} {READ_OTHER} {MEET}", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_fence_before_a_relaxed_arrival_orders_the_stores_before_it(mode: Mode) -> None:
    out = run(f"st.shared.b32 [%r5], %r8; fence.acq_rel.cluster; {RELAXED} {READ_OTHER} {MEET}", mode)
    assert out.tolist() == [1000 + i for i in range(32)] + list(range(32))
    with pytest.raises((findings.SharedRace, findings.UninitialisedShared)):
        run(f"fence.acq_rel.cluster; st.shared.b32 [%r5], %r8; {RELAXED} {READ_OTHER} {MEET}", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_relaxed_arrival_passes_on_barriers_that_were_fenced(mode: Mode) -> None:
    init = "@%p1 mbarrier.init.shared.b64 [smem+4096], 1;"
    arrive = f"@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7+4096]; {WAIT} {MEET}"
    run(f"{init} fence.mbarrier_init.release.cluster; {RELAXED} {arrive}", mode)
    with pytest.raises(findings.BarrierMisuse, match="no barrier between"):
        run(f"{init} {RELAXED} {arrive}", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_remote_arrival_releases(mode: Mode) -> None:
    body = f"""
    @%p1 mbarrier.init.shared.b64 [smem+4096], 1; fence.mbarrier_init.release.cluster; {MEET}
    st.shared::cluster.b32 [%r6], %r8; bar.warp.sync -1;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7+4096];
    {WAIT} ld.shared.b32 %r10, [%r5]; st.global.b32 [%d2], %r10; {MEET}
    """
    assert run(body, mode).tolist() == [1000 + i for i in range(32)] + list(range(32))


COPY_OUT = """@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d2], [smem], 128;
@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"""
STORE_OTHER = "st.shared::cluster.b32 [%r6], %r8;"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("fence", ["fence.proxy.async;", "fence.proxy.async.shared::cluster;"])
def test_copies_read_what_the_other_block_stored_and_fenced(fence: str, mode: Mode) -> None:
    out = run(f"{STORE_OTHER} {fence} {MEET} {COPY_OUT}", mode)
    assert out.tolist() == [1000 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_fence_of_the_own_memory_covers_what_the_other_block_stored_there(mode: Mode) -> None:
    out = run(f"{STORE_OTHER} {MEET} fence.proxy.async.shared::cta; {COPY_OUT}", mode)
    assert out.tolist() == [1000 + i for i in range(32)] + list(range(32))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("fence", ["", "fence.proxy.async.shared::cta;", "fence.proxy.async.global;"])
def test_a_fence_of_other_memory_does_not_cover_stores_to_the_other_block(fence: str, mode: Mode) -> None:
    with pytest.raises(findings.MissingProxyFence):
        run(f"{STORE_OTHER} {fence} {MEET} {COPY_OUT}", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_block_that_skips_the_cluster_barrier_is_waited_for(mode: Mode) -> None:
    with pytest.raises(findings.Deadlock, match="barrier cluster: 32 of 64 threads"):
        run(f"setp.eq.u32 %p2, %r1, 0; @%p2 bra E; {MEET} E:", mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_multicast_copy_reaches_both_blocks(mode: Mode) -> None:
    source = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    tensor = TensorMap(source.ctypes.data, "f32", 4, (32, 16), (4, 128), (32, 8), 128)
    body = f"""
    @%p1 mbarrier.init.shared.b64 [smem+4096], 1; fence.mbarrier_init.release.cluster; {MEET}
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+4096], 1024;
    mov.u64 %d3, m0; setp.eq.u32 %p2, %r1, 0; and.pred %p2, %p1, %p2; mov.b16 %h1, 3;
    @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [smem], [%d3, {{0, 8}}], [smem+4096], %h1;
    {WAIT} xor.b32 %r11, %r5, 16; ld.shared.b32 %r10, [%r11+128]; st.global.b32 [%d2], %r10; {MEET}
    """
    out = run(body, mode, [source], [tensor])
    assert out.tolist() == 2 * source[9].tolist()  # row 1 of the box lies swizzled: chunks of 16 bytes xor 1


def test_boxes_are_cut_at_the_edges_of_the_tensor_and_filled_with_zeros() -> None:
    source = np.arange(1, 1 + 10 * 8, dtype=np.uint32).reshape(10, 8)
    tensor = TensorMap(source.ctypes.data, "f32", 4, (8, 10), (4, 32), (8, 4))
    text = module("""
    mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; shl.b32 %r4, %r0, 2; mov.u32 %r3, smem; add.u32 %r5, %r3, %r4;
    @%p1 mbarrier.init.shared.b64 [smem+4096], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+4096], 128; mov.u64 %d3, m0;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [smem], [%d3, {-2, 8}], [smem+4096];
    """ + WAIT + """
    ld.shared.b32 %r10, [%r5]; ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r0, 4; add.u64 %d2, %d1, %d2;
    st.global.b32 [%d2], %r10;
    """, 2, maps=1, shared=8192)  # fmt: skip
    out = np.zeros(32, np.uint32)
    execute(text, [out, source], maps=[tensor])
    want = np.zeros((4, 8), np.uint32)
    want[:2, 2:] = source[8:, :6]
    np.testing.assert_array_equal(out.reshape(4, 8), want)


# A block counts itself, then each block that it takes over, until there is none.
COUNT = "mul.wide.u32 %d3, %r20, 4; add.u64 %d3, %d1, %d3; @%p1 red.global.add.u32 [%d3], 1;"
TAKE_OVER = f"""
mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; ld.param.u64 %d1, [p0]; mov.u32 %r20, %ctaid.x; mov.u32 %r21, 0;
@%p1 mbarrier.init.shared.b64 [smem+16], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
L: {COUNT}
@%p1 mbarrier.arrive.expect_tx.shared.b64 %d9, [smem+16], 16;
@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [smem], [smem+16];
{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [smem+16], %r21; @P bra D; bra W; D: }}
ld.shared.v2.b64 {{%d5, %d6}}, [smem];
{{ .reg .b128 handle; mov.b128 handle, {{%d5, %d6}};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, handle;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r20, %r22, %r23, _}}, handle; }}
xor.b32 %r21, %r21, 1; fence.proxy.async.shared::cta; bar.sync 0; @%p2 bra L;
"""


def taken_over(body: str, mode: Mode) -> Any:
    out = np.zeros(9, np.uint32)
    execute(module(body, 1, threads=64, shared=64), [out], threads=64, grid=9, mode=mode)
    return out


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_blocks_that_take_over_others_do_every_block_once(mode: Mode) -> None:
    assert taken_over(TAKE_OVER, mode).tolist() == [1] * 9


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_response_is_waited_for(mode: Mode) -> None:
    wait = "W: mbarrier.try_wait.parity.shared.b64 P, [smem+16], %r21; @P bra D; bra W; D:"
    with pytest.raises((findings.SharedRace, findings.UninitialisedShared)):
        taken_over(TAKE_OVER.replace(wait, ""), mode)
    with pytest.raises(findings.Misaligned):
        taken_over(TAKE_OVER.replace("[smem], [smem+16]", "[smem+8], [smem+16]"), mode)


@pytest.mark.parametrize("mode", [EAGER, LATE], ids=str)
def test_a_response_is_not_written_over_what_is_read(mode: Mode) -> None:
    with pytest.raises(findings.SharedRace):
        taken_over(TAKE_OVER.replace("fence.proxy.async.shared::cta; bar.sync 0;", ""), mode)
