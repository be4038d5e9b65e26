"""Gradients of packed sequences by the emulated kernels against fp64: empty ones, unused rows, mods, a fixed order."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends import reference
from composattn.backends.fused.planning.plan import Plan
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import captured
from composattn.backends.fused.running.launch_backward import BackwardLauncher
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.call.sequences import Sequences
from composattn.emulator.launch import Stream
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.testing import check, make_case, make_varlen_case, poisoned
from composattn.testing import run as run_case
from tests.support import outlier_normal, sampled

SLOPES, BIAS, DOCUMENT = torch.rand(4), torch.randn(4, 400), torch.arange(200) // 70


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "from-the-end": (None, lambda b, h, q, kv: kv + 40 > q),
    "window-by-sequence": (None, lambda b, h, q, kv: (q >= kv) & (q - kv < 30 + 10 * b)),
    "document": (None, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]),
    "alibi": (lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv), causal),
    "softcap": (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), causal),
    "relative": (lambda s, b, h, q, kv: s + BIAS[h, q - kv + 200], None),
}

# mods, dtype, query heads, key heads, lengths of queries, of keys (None: the same), D, Dv, LSE, in order, used
CASES: dict[str, tuple[Any, ...]] = {
    "plain-d128": ("plain", torch.bfloat16, 1, 1, [100, 0, 1, 129], None, 128, 128, True, False, False),
    "causal-gqa2-d64": ("causal", torch.bfloat16, 2, 1, [130, 64, 7], None, 64, 64, True, False, False),
    "causal-gqa2-d96": ("causal", torch.bfloat16, 4, 2, [130, 3, 70], None, 96, 96, True, False, False),
    "other-lengths-d64": ("plain", torch.float16, 1, 1, [70, 0, 33, 80], [129, 50, 0, 1], 64, 64, False, False, False),
    "from-the-end": ("from-the-end", torch.bfloat16, 1, 1, [70, 90], [150, 60], 128, 128, True, False, False),
    "window-used-gqa2": ("window-by-sequence", torch.bfloat16, 2, 1, [120, 40], None, 128, 128, True, False, True),
    "document-in-order": ("document", torch.float16, 2, 1, [180, 0, 60], None, 64, 64, True, True, False),
    "causal-used-in-order": ("causal", torch.bfloat16, 1, 1, [280, 130], None, 128, 128, False, True, True),
    "causal-gqa8-in-order": ("causal", torch.bfloat16, 8, 1, [130, 0, 200, 130], None, 128, 128, True, True, False),
    "plain-d96-in-order": ("plain", torch.bfloat16, 1, 1, [130, 0, 200, 130], None, 96, 96, True, True, False),
    "relative-d96-in-order": ("relative", torch.bfloat16, 1, 1, [130, 0, 70], None, 96, 96, True, True, False),
    "causal-gqa2-d64-in-order": ("causal", torch.float16, 2, 1, [150, 20, 280], None, 64, 64, True, True, True),
    "alibi-gqa2-d128": ("alibi", torch.bfloat16, 4, 2, [33, 90], None, 128, 128, True, False, False),
    "softcap-used-d64": ("softcap", torch.bfloat16, 1, 1, [100, 70], [60, 110], 64, 64, False, False, True),
    "relative-d256": ("relative", torch.bfloat16, 1, 1, [90, 30], None, 256, 256, True, False, False),
    "causal-d192-in-order": ("causal", torch.bfloat16, 1, 1, [130, 0, 70], None, 192, 192, True, True, True),
    "causal-used-gqa2-d192": ("causal", torch.bfloat16, 2, 1, [130, 0, 70], None, 192, 192, True, False, True),
    "from-the-end-d192-dv128": (
        "from-the-end", torch.bfloat16, 1, 1, [70, 90], [150, 60], 192, 128, True, True, False,
    ),
    "window-d256-in-order": ("window-by-sequence", torch.float16, 1, 1, [80, 70], None, 256, 256, True, True, True),
    "no-keys-used": ("plain", torch.bfloat16, 2, 1, [60, 40], [3, 14], 64, 64, False, False, True),
}  # fmt: skip


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("case", sampled(CASES))
def test_emulated_gradients_of_packed_sequences_match_fp64(case: str, folder: Path, generator: torch.Generator) -> None:
    check_packed(case, folder, generator)


@pytest.mark.parametrize(
    "case", [pytest.param("plain-d128", marks=pytest.mark.slow), "from-the-end", "window-used-gqa2"]
)
def test_dq_of_packed_sequences_leaves_in_bulk_too(case: str, folder: Path, generator: torch.Generator) -> None:
    check_packed(case, folder, generator, tile_m=80, persistent=False, dq_leaves="in bulk")


# three entries of the table that are no tiles; a sequence whose last keys nobody uses
@pytest.mark.parametrize(
    "case, changes",
    [
        ("window-used-gqa2", {"persistent": True}),
        pytest.param("causal-gqa2-d96", {"persistent": True}, marks=pytest.mark.slow),
        ("no-keys-used", {"persistent": False, "dq_begins": "before"}),
        pytest.param("causal-used-gqa2-d192", {}, marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_each_query_head_of_a_group_is_a_piece_of_its_tiles_of_keys(
    case: str, changes: dict[str, Any], folder: Path, generator: torch.Generator
) -> None:
    check_packed(case, folder, generator, heads_a_piece=1, heads_together=1, **changes)


def test_where_no_sequence_uses_keys_the_last_kernel_waits_for_the_first(
    folder: Path, generator: torch.Generator
) -> None:
    """The first one clears dQ; no block of the one between has anything to do, and the last one waits for that one."""
    check_packed("no-keys-used", folder, generator, persistent=False, dq_begins="before")


def check_packed(case: str, folder: Path, generator: torch.Generator, **changes: Any) -> None:
    mods, dtype, heads, kv_heads, q_lens, kv_lens, d, dv, through_lse, in_order, with_used = CASES[case]
    score, mask = MODS[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    cu_q = offsets(q_lens)
    cu_k = cu_q if kv_lens is None else offsets(kv_lens)
    kv_lens = q_lens if kv_lens is None else kv_lens
    used_q = [max(0, n - 13 * i - 5) for i, n in enumerate(q_lens)] if with_used else q_lens
    used_k = [max(0, n - 11 * i - 3) for i, n in enumerate(kv_lens)] if with_used else kv_lens
    rows = [slice(int(a), int(a) + n) for (a, _), n in zip(pairwise(cu_q), used_q, strict=True)]
    keys = [slice(int(a), int(a) + n) for (a, _), n in zip(pairwise(cu_k), used_k, strict=True)]
    total_q, total_k = sum(q_lens), sum(kv_lens)

    def draw(total: int, used: list[slice], heads: int, d: int) -> torch.Tensor:
        drawn = outlier_normal(total, heads, d, generator=generator, dtype=dtype)
        poisoned = torch.full_like(drawn, torch.nan)
        for s in used:
            poisoned[s] = drawn[s]
        return poisoned

    q, dout = draw(total_q, rows, heads, d), draw(total_q, rows, heads, dv)
    k, v = draw(total_k, keys, kv_heads, d), draw(total_k, keys, kv_heads, dv)
    dlse = torch.randn(heads, total_q, generator=generator)
    out, lse = torch.full((total_q, heads, dv), torch.nan, dtype=dtype), torch.full((heads, total_q), torch.nan)
    wanted = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)]
    scale = d**-0.5
    for b, (r, c) in enumerate(zip(rows, keys, strict=True)):
        exact = [t[s].double().transpose(0, 1)[None].requires_grad_() for t, s in ((q, r), (k, c), (v, c))]
        found_out, found_lse = reference.attention(
            *(t.expand(b + 1, -1, -1, -1) for t in exact), score=program.score, mask=program.mask, scale=scale
        )
        found_out, found_lse = found_out[b], found_lse[b]  # as sequence b: mods look at it
        out[r], lse[:, r] = found_out.transpose(0, 1).to(dtype), found_lse.float()
        loss = (found_out.transpose(0, 1) * dout[r].double()).sum()
        if through_lse:
            loss = loss + torch.where(found_lse == -math.inf, 0.0, found_lse * dlse[:, r].double()).sum()
        grads = torch.autograd.grad(loss, exact)
        for total, s, g in zip(wanted, (r, c, c), grads, strict=True):
            total[s] = g[0].transpose(0, 1)

    stream = Stream()

    def kernel_of(plan: Plan) -> Any:
        kernel = captured(plan, folder)
        return lambda *given: stream.run(kernel.program, kernel.launch(*given, dynamic_shared=plan.shared_memory))

    def counts(used: list[int]) -> torch.Tensor | None:
        return torch.tensor(used, dtype=torch.int32) if with_used else None

    varlen = ca.Varlen(cu_q, cu_k, seqused_q=counts(used_q), seqused_k=counts(used_k))
    problem = Problem.of(q, k, v, varlen=varlen)
    plans = plan_backward(problem, program, HOPPER, has_dlse=through_lse, deterministic=in_order)
    if changes:
        tiling = dataclasses.replace(plans.main.tiling, **changes)
        plans = plan_backward(problem, program, HOPPER, has_dlse=through_lse, deterministic=in_order, tiling=tiling)
    with poisoned():
        found = BackwardLauncher(plans, kernel_of)(
            q, k, v, out, lse, dout, dlse if through_lse else None, scale,
            [c.tensor for c in plans.main.captured], [s.value for s in program.scalars], Sequences.of(varlen, None),
        )  # fmt: skip
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        unused = torch.ones(len(want), dtype=torch.bool)
        for s in rows if name == "dq" else keys:
            unused[s] = False
        assert not got[unused].any(), f"{name} of rows that no sequence uses"
        error, size = float((got.double() - want).norm()), float(want.norm())
        assert error <= 2 * torch.finfo(dtype).eps * size, f"{name}: {error:.2e} of {size:.2e}"


LEARNED: dict[str, Any] = {
    "distance": lambda t: lambda s, b, h, q, kv: s + t["relative"][h, q - kv + 130],
    "row-and-column": lambda t: lambda s, b, h, q, kv: s + 0.1 * t["row"][b, q] + t["column"][kv],
    "slope-by-sequence-and-head": lambda t: lambda s, b, h, q, kv: s - t["slope"][b, h] * (q - kv),
    "not-in-the-kernel": lambda t: lambda s, b, h, q, kv: s * t["slope"][b, h],
}


@pytest.mark.parametrize("name", LEARNED)
def test_captured_gradients_of_packed_sequences_are_right(name: str, generator: torch.Generator) -> None:
    def table(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).requires_grad_()

    tables = {"relative": table(2, 261), "row": table(3, 130), "column": table(130), "slope": table(3, 2)}
    case = make_varlen_case(
        int(torch.randint(1000, (), generator=generator)), [60, 0, 130], used_q=[51, 0, 99],
        score_mod=LEARNED[name](tables), mask_mod=causal, heads=2, kv_heads=1, dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    check(partial(ca.attention, backend="hopper-emulated"), case)


def test_lists_serve_packed_sequences_in_a_fixed_order(generator: torch.Generator) -> None:
    blocks = torch.rand(2, 2, 10, 10, generator=generator) < 0.4
    case = make_varlen_case(
        3, [150, 40], [90, 140], mask_mod=lambda b, h, q, kv: blocks[b, h, q // 16, kv // 16], heads=2, dim=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    problem = Problem.of(case.q, case.k, case.v, varlen=case.varlen)
    assert plan_backward(problem, case.program, HOPPER, deterministic=True).main.lists is not None
    attention = partial(ca.attention, backend="hopper-emulated", deterministic=True)
    check(attention, case)
    first, again = (run_case(attention, case) for _ in range(2))
    assert all(torch.equal(first[name].nan_to_num(), again[name].nan_to_num()) for name in first)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("mask", [None, causal, lambda b, h, q, kv: abs(q - kv) < 40], ids=["full", "causal", "window"])
def test_where_keys_lie_as_queries_whose_turn_is_first_writes_dq(
    mask: Any, dim: int, generator: torch.Generator
) -> None:
    """Sequences that are empty, not used or used in part are among them: each tile of queries sees some keys."""
    options: dict[str, Any] = {"mask_mod": mask, "heads": 2, "kv_heads": 1, "dim": dim, "dtype": torch.bfloat16}
    case = make_varlen_case(7, [150, 0, 1, 70, 30], used_q=[131, 0, 1, 70, 0], **options)
    problem = Problem.of(case.q, case.k, case.v, varlen=case.varlen)
    assert plan_backward(problem, case.program, HOPPER, deterministic=True).main.tiling.first_writes
    check(partial(ca.attention, backend="hopper-emulated", deterministic=True), case)


def test_dq_is_cleared_where_sequences_may_have_no_keys_for_their_queries() -> None:
    cu, same = offsets([150, 70]), torch.tensor([150, 7], dtype=torch.int32)
    q = torch.zeros(220, 1, 64, dtype=torch.bfloat16)
    program = Program(None, Mask.of(causal).expr)
    hidden = Program(None, Mask.of(lambda b, h, q, kv: q > kv).expr)

    def first_writes(varlen: ca.Varlen, program: Program = program) -> bool:
        problem = Problem.of(q, q, q, varlen=varlen)
        return plan_backward(problem, program, HOPPER, deterministic=True).main.tiling.first_writes

    assert (
        first_writes(ca.Varlen(cu)) and first_writes(ca.Varlen(cu, cu)) and first_writes(ca.Varlen(cu, seqused_q=same))
    )
    assert first_writes(ca.Varlen(cu, cu, seqused_q=same, seqused_k=same))
    assert not first_writes(ca.Varlen(cu, cu.clone()))
    assert not first_writes(ca.Varlen(cu, seqused_k=same)) and not first_writes(ca.Varlen(cu, cu, seqused_k=same))
    assert not first_writes(ca.Varlen(cu), hidden)


def test_calls_whose_keys_lie_otherwise_have_plans_of_their_own(generator: torch.Generator) -> None:
    """One module, equal shapes and longest ones: first of sequences whose keys lie as their queries, then others."""
    module = ca.Attention(mask_mod=causal, backend="hopper-emulated", deterministic=True)

    def attention(q: Any, k: Any, v: Any, *, varlen: ca.Varlen, return_lse: bool, **of_the_module: Any) -> Any:
        return module(q, k, v, varlen=varlen, return_lse=return_lse)

    options: dict[str, Any] = {"mask_mod": causal, "heads": 1, "dim": 64, "dtype": torch.bfloat16}
    for kv_lens in (None, [0, 150, 120], [150, 70, 50]):
        check(attention, make_varlen_case(9, [150, 70, 50], kv_lens, **options))


@pytest.mark.parametrize("order", ["longest_first", "shortest_first", "in_order"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_gradients_depend_on_no_order(order: Any, packed: bool, generator: torch.Generator) -> None:
    """A mask that leaves later keys more queries, so that the default order of the keys does not serve."""
    options: dict[str, Any] = {"mask_mod": lambda b, h, q, kv: q <= kv, "heads": 1, "dim": 64, "dtype": torch.bfloat16}
    case = make_varlen_case(5, [150, 290], **options) if packed else make_case(5, batch=1, q_len=290, **options)
    check(partial(ca.attention, backend="hopper-emulated", schedule=ca.Schedule(order=order)), case)


@pytest.mark.parametrize("in_order", [False, True])
def test_new_lengths_need_no_other_kernel(in_order: bool) -> None:
    def keys(lengths: list[int], used: list[int]) -> list[str]:
        case = make_varlen_case(0, lengths, used_q=used, mask_mod=causal, dim=64, dtype=torch.bfloat16)
        problem = Problem.of(case.q, case.k, case.v, varlen=case.varlen)
        made = plan_backward(problem, case.program, HOPPER, deterministic=in_order)
        return [made.preprocess.key, made.main.key, made.postprocess.key]

    assert keys([30, 7, 200], [30, 5, 1]) == keys([0, 400], [0, 111])


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["packed", "dense"])
def test_heads_come_together_as_asked_for(packed: bool) -> None:
    options: dict[str, Any] = {"mask_mod": causal, "heads": 3, "dim": 64, "dtype": torch.bfloat16}
    case = make_varlen_case(5, [150, 70], **options) if packed else make_case(5, batch=2, q_len=150, **options)
    check(partial(ca.attention, backend="hopper-emulated", schedule=ca.Schedule(heads_together=2)), case)
