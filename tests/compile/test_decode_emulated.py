"""Few queries on Hopper, emulated with no GPU: query heads packed into rows, and kv split into parts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.few_queries import splits
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import Schedule
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.errors import InvalidSchedule
from composattn.mods import causal, softcap
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.testing import check, make_case, make_paged_case, make_varlen_case
from tests.support import outlier_normal, sampled

# slopes of more heads than calls have, which h + 0 says
SLOPES, TREE = torch.rand(128), torch.rand(7, 300) < 0.5


def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - SLOPES[h + 0] * (q + 250 - kv)


def head_gain(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * (0.5 + SLOPES[h + 0]) + SLOPES[h + 0]


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv <= q + 250


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q + 250) & (kv > q + 200)


def of_even_heads(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q + 250) | ((h + kv) % 2 == 0)


def never(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q % 2 == 0) & (kv < 9)


# query heads, key heads, queries, keys, D, score mod, mask, schedule
CASES: dict[str, tuple[Any, ...]] = {
    "one-query-mha": (2, 2, 1, 300, 128, None, None, Schedule()),
    "one-query-gqa4": (8, 2, 1, 300, 128, None, None, Schedule()),
    "gqa3-causal": (6, 2, 5, 300, 128, None, late, Schedule(split_kv=1)),
    "gqa4-alibi": (8, 2, 7, 300, 64, alibi, late, Schedule(split_kv=1)),
    "gqa16-alibi": (16, 1, 2, 300, 64, alibi, late, Schedule(split_kv=1)),
    "gqa10-by-head": (20, 2, 3, 300, 64, head_gain, late, Schedule(split_kv=1)),
    "mask-by-head": (4, 2, 3, 300, 64, head_gain, of_even_heads, Schedule(split_kv=2)),
    "gqa4-tree": (4, 1, 7, 300, 128, None, lambda b, h, q, kv: TREE[q, kv], Schedule(split_kv=2)),
    "gqa4-d256": (4, 2, 3, 200, 256, None, late, Schedule(split_kv=2)),
    "mqa128-in-halves": (128, 1, 1, 140, 64, alibi, None, Schedule(split_kv=1)),
    "packed-prefill": (6, 2, 130, 180, 64, alibi, lambda b, h, q, kv: kv <= q, Schedule(pack_gqa=True)),
    "two-blocks-of-128-keys": (8, 2, 1, 300, 64, None, late, Schedule(split_kv=2)),
    "three-blocks-of-64-keys": (384, 384, 1, 200, 64, None, None, Schedule(split_kv=1)),
    "apart": (4, 2, 3, 200, 64, alibi, late, Schedule(pack_gqa=False, split_kv=1)),
    "split-3-gqa4-alibi": (8, 2, 1, 600, 128, alibi, None, Schedule(split_kv=3)),
    "more-parts-than-tiles": (2, 1, 3, 300, 64, None, window, Schedule(split_kv=9)),
    "rows-that-see-nothing": (2, 1, 4, 300, 64, None, never, Schedule(split_kv=2)),
    "split-2-prefill": (2, 1, 200, 300, 64, None, lambda b, h, q, kv: kv <= q, Schedule(split_kv=2, pack_gqa=False)),
}


@pytest.mark.parametrize("name", sampled(CASES))
def test_decode_matches_fp64(name: str) -> None:
    heads, kv_heads, q_len, kv_len, dim, score, mask, schedule = CASES[name]
    case = make_case(
        7, score_mod=score, mask_mod=mask, batch=1, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len,
        dim=dim, dtype=torch.bfloat16, gradients=False,
    )  # fmt: skip
    check(functools.partial(ca.attention, backend="hopper-emulated", schedule=schedule), case)


# lengths of the keys, then as for `make_paged_case`, and the schedule
PAGED: dict[str, tuple[list[int], dict[str, Any], Schedule]] = {
    "decode-16": ([300, 17, 0, 128], {"page_size": 16, "heads": 8, "kv_heads": 2, "dim": 64}, Schedule()),
    "decode-64-split-2": ([300, 17], {"page_size": 64, "heads": 4, "kv_heads": 2, "dim": 128}, Schedule(split_kv=2)),
    "decode-256-alibi": (
        [300, 513], {"page_size": 256, "heads": 4, "kv_heads": 1, "dim": 128, "score_mod": alibi}, Schedule(split_kv=3),
    ),
    "chunk-32": (
        [300, 130],
        {"page_size": 32, "q_len": 130, "heads": 2, "kv_heads": 1, "dim": 64, "mask_mod": causal("bottom_right")},
        Schedule(),
    ),
    "tree-128-d256": (
        [290, 200], {"page_size": 128, "q_len": 7, "heads": 2, "kv_heads": 1, "dim": 256,
        "mask_mod": lambda b, h, q, kv: TREE[q, kv]}, Schedule(split_kv=2),
    ),
    "ragged-queries-16": (
        [300, 40, 7], {"page_size": 16, "q_lens": [3, 0, 7], "heads": 8, "kv_heads": 2, "dim": 64, "mask_mod": late},
        Schedule(split_kv=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(PAGED))
def test_keys_in_pages_match_fp64(name: str) -> None:
    """What no sequence uses is NaN in the cache, and what no sequence has of the page table is no page's number."""
    kv_lens, shape, schedule = PAGED[name]
    case = make_paged_case(5, kv_lens, dtype=torch.bfloat16, **shape)
    check(functools.partial(ca.attention, backend="hopper-emulated", schedule=schedule), case)


@pytest.mark.parametrize("schedule", [Schedule(split_kv=1), Schedule(split_kv=3)], ids=["whole", "split-3"])
def test_packed_queries_share_rows_with_heads(schedule: Schedule) -> None:
    case = make_varlen_case(
        5, [3, 0, 9, 1], [200, 30, 300, 5], used_q=[2, 0, 9, 1], score_mod=alibi, mask_mod=late, heads=6, kv_heads=2,
        dim=64, dtype=torch.float16, gradients=False,
    )  # fmt: skip
    check(functools.partial(ca.attention, backend="hopper-emulated", schedule=schedule), case)


def test_parts_are_the_same_bits_in_every_order() -> None:
    case = make_case(3, heads=4, kv_heads=1, q_len=2, kv_len=600, dim=64, dtype=torch.float16, gradients=False)
    attention = ca.Attention(backend="hopper-emulated", schedule=Schedule(split_kv=3))
    results = []
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            results.append(attention(case.q, case.k, case.v))
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize(
    ("heads", "queries", "d", "mods", "split"),
    sampled(
        [
            (8, 1, 128, {}, 1),
            (4, 2, 64, {"mask_mod": late}, 2),
            (2, 4, 96, {"score_mod": softcap(20.0), "mask_mod": window}, 1),
            (4, 1, 128, {"score_mod": alibi}, 3),
            (3, 2, 192, {"mask_mod": lambda b, h, q, kv: TREE[q, kv]}, 1),
        ]
    ),
)
def test_eight_rows_are_those_of_a_whole_tile(
    heads: int, queries: int, d: int, mods: dict[str, Any], split: int, generator: torch.Generator
) -> None:
    q = outlier_normal(2, heads, queries, d, generator=generator, dtype=torch.bfloat16)
    k, v = (outlier_normal(2, 1, 300, d, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    wanted, wanted_lse = ca.attention(q.double(), k.double(), v.double(), return_lse=True, backend="reference", **mods)
    program, problem = ca.Attention(**mods).program, Problem.of(q, k, v)
    problem = dataclasses.replace(problem, schedule=Schedule(split_kv=split))
    plan = plan_forward(problem, program, HOPPER, return_max_scores=True)
    assert plan.tiling.eight_rows
    captured = [c.tensor for c in program.captures]
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            out, lse, highest = EmulatedForward(plan)(q, k, v, d**-0.5, captured)
        assert lse is not None and highest is not None
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)


def test_more_rows_than_a_kernel_computes_are_refused() -> None:
    few, many = (Problem(1, 8, 2, n, 300, 64, 64, torch.bfloat16, torch.device("cpu")) for n in (2, 3))
    eight = choose_forward(few, Program(), HOPPER).tiling
    assert eight.eight_rows and eight.most_rows == 8
    with pytest.raises(ValueError, match="computes 8 rows"):
        plan_forward(many, Program(), HOPPER, tiling=eight)


def plan(
    heads: int, kv_heads: int, q_len: int, dim: int, score: Any = None, mask: Any = None, page_size: int = 0
) -> ForwardPlan:
    layout = Layout(kv="paged", page_size=page_size, used_kv=True) if page_size else DENSE
    problem = Problem(1, heads, kv_heads, q_len, 8192, dim, dim, torch.bfloat16, torch.device("cuda"), layout=layout)
    program = Program(score and Score.of(score).expr, mask and Mask.of(mask).expr)
    return plan_forward(problem, program, HOPPER)


def roles_fit(artifact: Artifact) -> bool:
    """Whether a block has the registers that its roles ask for; a role that asks for more waits forever."""
    if not isinstance(artifact.plan, ForwardPlan):
        return True
    t = artifact.plan.tiling
    computing, copying = t.registers(artifact.plan.layout.kv == "paged")
    return 128 * (t.warpgroups * computing + copying) <= artifact.registers * artifact.threads


PLANS = {
    "gqa4-d64": plan(32, 8, 1, 64),
    "gqa4-d64-in-threes": plan(384 * 4, 384, 1, 64),
    "gqa4-d128": plan(32, 8, 1, 128),
    "gqa4-d256": plan(32, 8, 1, 256),
    "mqa32-alibi-d128": plan(32, 1, 2, 128, alibi, late),
    "pages-of-16-d128": plan(32, 8, 1, 128, page_size=16),
    "chunk-pages-of-16-d128": plan(32, 8, 512, 128, page_size=16),
}


@pytest.mark.parametrize("name", PLANS)
def test_decode_compiles_lean(name: str) -> None:
    chosen = PLANS[name]
    for artifact in (compile_offline(chosen), compile_offline(chosen.combine)):
        if artifact.registers is None or not artifact.assembly:
            pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
        assert artifact.spills == 0
        assert artifact.registers * artifact.threads <= HOPPER.registers
        assert roles_fit(artifact)
        assert artifact.shared_memory <= HOPPER.shared_memory


def problem(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, schedule: Schedule = Schedule()) -> Problem:  # noqa: B008
    return Problem(
        batch, heads, kv_heads, q_len, kv_len, 128, 128, torch.bfloat16, torch.device("cuda"), schedule=schedule
    )


def test_parts_fill_the_multiprocessors_when_there_are_few_queries() -> None:
    def parts(p: Problem) -> int:
        return splits(p, choose_forward(p, Program(), HOPPER).tiling, HOPPER)

    assert parts(problem(1, 32, 8, 1, 131072)) == 16  # 128 blocks of 132
    assert parts(problem(1, 1, 1, 128, 128)) == 1
    assert parts(problem(4, 16, 16, 4096, 4096)) == 1
    assert parts(problem(1, 32, 8, 1, 8192, Schedule(split_kv=5))) == 5


def test_heads_share_rows_when_that_makes_fewer_tiles() -> None:
    def heads(p: Problem, mask: Any = None) -> int:
        return choose_forward(p, Program(None, mask and Mask.of(mask).expr), HOPPER).tiling.packed_heads

    assert heads(problem(1, 32, 8, 1, 8192)) == 4
    assert heads(problem(1, 32, 8, 4096, 4096)) == 1
    assert heads(problem(1, 32, 8, 4096, 4096, Schedule(pack_gqa=True))) == 4
    assert heads(problem(1, 32, 8, 1, 8192, Schedule(pack_gqa=False))) == 1
    assert heads(problem(1, 128, 1, 1, 8192)) == 64
    assert heads(problem(1, 71, 1, 1, 8192)) == 1

    def bounds_by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q + h

    assert heads(problem(1, 32, 8, 1, 8192), bounds_by_head) == 1
    with pytest.raises(InvalidSchedule, match="the mask depends on the head"):
        heads(problem(1, 32, 8, 1, 8192, Schedule(pack_gqa=True)), bounds_by_head)


def test_another_number_of_parts_is_the_same_kernel() -> None:
    two, five = (plan_forward(problem(1, 8, 2, 1, 4096, Schedule(split_kv=n)), Program(), HOPPER) for n in (2, 5))
    assert two.key == five.key
    assert "kv in 5 parts" in str(five)
