"""explain() says what a call computes, what it skips and at what rate the parts of a mod are computed."""

from __future__ import annotations

import re

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.call.inputs import Inputs
from composattn.mods import alibi, causal, document, neighborhood, relative_bias, sliding_window, softcap
from composattn.testing import make_paged_case, make_varlen_case
from tests.support import has_kernel_toolchain


def explained(q_len: int = 512, **mods: object) -> str:
    q = torch.empty(2, 4, q_len, 32)
    kv = torch.empty(2, 2, q_len, 32)
    return str(ca.Attention(**mods).explain(q, kv, kv))  # type: ignore[arg-type]


def test_shows_shapes_scale_and_backend() -> None:
    text = explained()
    assert "4 query heads on 2 key/value heads" in text
    assert "512 queries x 512 keys" in text
    assert "0.176777" in text
    assert "streaming" in text


def test_shows_the_mods_as_formulas() -> None:
    text = explained(score_mod=softcap(30.0), mask_mod=causal())
    assert "tanh" in text
    assert "q >= kv" in text


def test_shows_the_derivative_that_nobody_wrote() -> None:
    table = torch.randn(4, 65, requires_grad=True)
    text = explained(score_mod=relative_bias(table) >> softcap(20.0))
    read = "t0[h, min(max(q - kv, -32), 32) - -32]"
    slope = f"1 - tanh((s + {read}) / 20)·tanh((s + {read}) / 20)"
    assert f"d score_mod/d score = {slope}\n" in text and f"d score_mod/d {read} = {slope}\n" in text
    assert text.count("d score_mod/d ") == 2


def test_shows_at_what_rate_parts_are_computed() -> None:
    text = explained(score_mod=alibi(torch.rand(4)), mask_mod=document(torch.zeros(512, dtype=torch.int64)))
    assert "head-only" in text
    assert "row-only" in text
    assert "column-only" in text


def test_counts_tiles_and_flops_of_a_window() -> None:
    q = torch.empty(1, 1, 1024, 64)
    explanation = ca.Attention(mask_mod=causal() & sliding_window(128)).explain(q, q, q)
    # 8 tiles on the diagonal and the 7 below it, no tile visible whole
    assert (explanation.tiles.visited, explanation.tiles.total) == (15, 64)
    assert explanation.flops == 15 * 128 * 128 * 4 * 64


def test_counts_every_batch_and_head() -> None:
    q = torch.empty(3, 5, 256, 64)
    explanation = ca.Attention(mask_mod=causal()).explain(q, q, q)
    assert explanation.tiles.total == 4 * 15
    assert explanation.tiles.full == 15


def test_counts_the_tiles_of_every_sequence() -> None:
    case = make_varlen_case(0, (300, 0, 128, 129), heads=2)
    explanation = ca.Attention(mask_mod=causal()).explain(case.q, case.k, case.v, varlen=case.varlen)
    assert (explanation.tiles.total, explanation.tiles.visited) == (2 * (9 + 1 + 4), 2 * (6 + 1 + 3))
    assert "4 sequences, 2 heads, 0 to 300 packed queries x 0 to 300 packed keys" in str(explanation)


def test_counts_the_tiles_of_keys_in_pages() -> None:
    case = make_paged_case(0, (300, 0, 128), q_len=1, heads=4, kv_heads=2)
    mask = causal("bottom_right") & sliding_window(100, align="bottom_right")
    explanation = ca.Attention(mask_mod=mask).explain(case.q, case.k, case.v, paged=case.paged)
    assert (explanation.tiles.total, explanation.tiles.visited) == (4 * (3 + 1), 4 * (2 + 1))
    assert "1 to 1 dense queries x 0 to 300 paged keys in pages of 16" in str(explanation)


@pytest.mark.skipif(not has_kernel_toolchain(), reason="nvidia-cutlass-dsl is not installed (extra: gpu)")
@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_explains_the_plans_of_the_kernels(paged: bool) -> None:
    dtype, bias = torch.bfloat16, torch.zeros(4, 400, requires_grad=True)
    shape = {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": dtype}
    case = make_paged_case(0, (300, 0), q_len=1, **shape) if paged else make_varlen_case(0, (300, 0), **shape)
    attend = ca.Attention(score_mod=lambda s, b, h, q, kv: s + bias[h, kv], backend="hopper-emulated")
    explained = str(attend.explain(case.q, case.k, case.v, varlen=case.varlen, paged=case.paged))
    assert "forward on hopper" in explained and ("eight_rows" in explained) is paged, "of pages one query"
    assert ("backward on hopper" in explained) == ("captured sums" in explained) == (not paged)


def test_whole_multiples_keep_their_parentheses() -> None:
    attend = explained(score_mod=lambda s, b, h, q, kv: s + 3 * (q // 3) + (kv % 5) * h)
    assert "s + 3·(q // 3) + (kv % 5)·h" in attend


def test_explains_the_schedule_that_was_asked_for() -> None:
    q = torch.empty(1, 1, 128, 64)
    attend = ca.Attention(schedule=ca.Schedule(order="in_order"), deterministic=True)
    problem = attend.problem(Inputs(q, q, q))
    assert problem.schedule.order == "in_order" and problem.deterministic


def test_plans_of_gpu_kernels_are_shown_with_no_gpu() -> None:
    q = torch.empty(1, 4, 512, 64, dtype=torch.bfloat16)
    text = str(ca.Attention(mask_mod=causal(), backend="hopper").explain(q, q, q))
    assert "backend     hopper" in text
    assert "planned for H200, not to run here: q lies on cpu" in text
    assert "queries x" in text.partition("plan  ")[2]


def test_what_kernels_refuse_is_refused_when_explained() -> None:
    q = torch.empty(1, 1, 512, 640, dtype=torch.bfloat16)
    with pytest.raises(ca.errors.UnsupportedHeadDim):
        ca.Attention(backend="hopper").explain(q, q, q)


def of_image(rows: int, columns: int, cut: int = 0, **mods: object) -> str:
    """Explained as Hopper would run a neighbourhood of 13 by 13 of an image whose last row lacks so many columns."""
    x = torch.empty(1, 16, rows * columns - cut, 64, dtype=torch.bfloat16)
    attn = ca.Attention(mask_mod=neighborhood((rows, columns), 13), backend="hopper", **mods)  # type: ignore[arg-type]
    return str(attn.explain(x, x, x))


def test_says_what_a_call_is_rewritten_to_or_why_it_stays_as_it_is() -> None:
    assert "rewrites    strips: 6 of 16 columns of an image of 96, keys of 32 from 8 before" in of_image(96, 96)
    cut = of_image(96, 96, cut=40)
    assert "rewrites    strips: 6 of 16 columns of an image of 96, keys of 32 from 8 before" in cut
    assert "with 56 columns of a last row" in cut
    sinks = of_image(96, 96, sinks=torch.zeros(16))
    assert "rewrites       strips: nothing, as each part would have the sinks" in sinks
    assert "strips, backward: nothing, as strips would take" in of_image(128, 18)
    assert "rewrites" not in explained(mask_mod=causal())


def test_what_the_call_refuses_for_what_mods_read_is_refused() -> None:
    q = torch.randn(1, 8, 64, 32)
    for options in ({"score_mod": alibi(4)}, {"mask_mod": document(torch.zeros(10, dtype=torch.int64))}):
        with pytest.raises(errors.ComposattnError) as of_call:
            ca.attention(q, q, q, **options)  # type: ignore[call-overload]
        with pytest.raises(type(of_call.value), match=re.escape(str(of_call.value))):
            ca.Attention(**options).explain(q, q, q)  # type: ignore[arg-type]
