"""The forward kernel with lists of kv tiles, emulated: right, and copying the tiles that are visible only."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running import emulated
from composattn.backends.fused.running.emulated import EmulatedForward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.emulator import program as programs
from composattn.mods import masks, scores
from composattn.mods.mask import Mask
from tests.dense_tiles import tiles_of
from tests.support import qkv, sampled

BLOCKS = torch.tensor([[[1, 0, 1], [0, 0, 0], [0, 1, 1]], [[0, 1, 0], [1, 1, 1], [0, 0, 1]]], dtype=torch.bool)

MASKS = {
    "grid": masks.neighborhood((15, 20), (3, 5)),
    "blocks_by_head": ca.mask(lambda b, h, q, kv: BLOCKS[h, q // 128, kv // 128]),
    "documents_apart": masks.document(torch.arange(300) // 40 % 3),
    "topk_causal": ca.BlockSparse.topk(torch.tensor([[[[0, 4], [-1, 1], [2, 0], [3, 3], [4, 1]]]]), 64, 300, 300)
    & masks.causal(),
}


def tensor_copies(forward: EmulatedForward) -> int:
    """Bulk copies from tensors that the run executed, one thread each."""
    result = forward.kernel.result
    assert result is not None
    copies = [
        sum(i.op.startswith("cp.async.bulk.tensor") and "shared::cta.global" in i.op for i in node.code)
        for node in result.program.nodes
    ]
    return sum(int(visits[n]) * count for visits in result.visits for n, count in enumerate(copies) if count)


@pytest.mark.parametrize("name", sampled(MASKS))
def test_matches_fp64_and_visits_what_is_visible(name: str, generator: torch.Generator) -> None:
    mask = MASKS[name]
    q, k, v = qkv(generator=generator, batch=1, heads=2, q_len=300, dim=64, dtype=torch.float16)
    program = Program(scores.softcap(20.0).expr, mask.expr)
    forward = EmulatedForward(plan_forward(Problem.of(q, k, v), program, HOPPER))
    assert forward.plan.lists is not None
    out, lse, _ = forward(q, k, v, 0.125, [c.tensor for c in program.captures])
    wide = [t.double() for t in (q, k, v)]
    options = {"score_mod": scores.softcap(20.0), "mask_mod": mask, "return_lse": True, "backend": "reference"}
    exact, exact_lse = ca.attention(*wide, **options)
    assert (out - exact).abs().max() < 5e-3 * max(1.0, exact.abs().max())
    assert lse is not None and torch.allclose(lse, exact_lse.float(), atol=1e-3)
    tiling = forward.plan.tiling
    exact_tiles = tiles_of(mask.dense(300, 300, 1, 2), (tiling.tile_m, tiling.tile_n)).expand(1, 2, -1, -1) > 0
    visited = exact_tiles.sum(-1)
    # a copy of Q a warpgroup where anything is visible, one of K and one of V a tile
    assert tensor_copies(forward) == int(((visited > 0) * tiling.warpgroups + 2 * visited).sum())


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).half()


def blocks(generator: torch.Generator, *shape: int, block: tuple[int, int]) -> ca.BlockSparse:
    return ca.BlockSparse(torch.rand(shape, generator=generator) < 0.5, block)


def agrees(mask: Mask, *inputs: torch.Tensor, **options: Any) -> None:
    """With the oracle; `schedule` is not for it."""
    out = ca.attention(*inputs, mask_mod=mask, backend="hopper-emulated", **options)
    options.pop("schedule", None)
    exact = ca.attention(*(t.double() for t in inputs), mask_mod=mask, backend="reference", **options)
    assert (out - exact).abs().max() < 5e-3 * max(1.0, exact.abs().max())


@pytest.mark.parametrize("heads_of_map", [1, 8], ids=["heads-packed-in-rows", "blocks-by-head"])
@pytest.mark.parametrize("parts", [1, 3])
def test_few_queries_over_listed_blocks(heads_of_map: int, parts: int, generator: torch.Generator) -> None:
    mask = blocks(generator, 1, heads_of_map, 1, 10, block=(16, 32))
    inputs = [draw(generator, 1, h, s, 64) for h, s in ((8, 5), (2, 300), (2, 300))]
    agrees(mask, *inputs, schedule=ca.Schedule(split_kv=parts))


def test_packed_sequences_over_listed_blocks(generator: torch.Generator) -> None:
    lengths = [130, 0, 70, 200]
    mask = blocks(generator, 4, 2, 4, 7, block=(64, 32)) & masks.causal()
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    agrees(mask, *(draw(generator, 400, 2, 64) for _ in range(3)), varlen=ca.Varlen(cu, max_seqlen_q=200))


def test_pages_over_listed_blocks(generator: torch.Generator) -> None:
    mask = blocks(generator, 2, 8, 1, 7, block=(16, 32))
    table = torch.randperm(20, generator=generator)[:14].view(2, 7).int()
    paged = ca.Paged(table, 32, torch.tensor([200, 77]).int())
    agrees(mask, draw(generator, 2, 8, 3, 64), *(draw(generator, 20, 2, 32, 64) for _ in range(2)), paged=paged)


def test_a_plan_holds_no_program_of_the_emulator(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, batch=1, heads=1, dim=64, dtype=torch.bfloat16)
    forward = EmulatedForward(plan_forward(Problem.of(q, k, v), Program(None, masks.causal().expr), HOPPER))
    out = forward(q, k, v, 0.125)[0]
    result, captured = forward.kernel.result, weakref.ref(forward.kernel.kernel)
    assert result is not None
    instructions, program = result.instructions, weakref.ref(result.program)
    del result
    emulated._kernels.clear()  # as others that are used later do
    programs._PROGRAMS.clear()
    gc.collect()
    assert captured() is None and program() is None
    assert forward.kernel.result.instructions == instructions
    assert torch.equal(forward(q, k, v, 0.125)[0], out)
