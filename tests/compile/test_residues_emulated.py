"""Dilated windows as sequences of one residue each: results and gradients of the whole, in the emulator."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.rewrites import prepared, residues
from composattn.backends.fused.rewrites.apart import CallApart
from composattn.backends.fused.rewrites.residues import ResidueGroup, groups
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import alibi, causal, dilated_window, padding
from composattn.mods.mask import Mask
from composattn.testing.tolerance import Case, check

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.02])


@pytest.fixture(autouse=True)
def short_residues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residues, "LEAST", 8)
    monkeypatch.setattr(residues, "LONG", 0)


def of_distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - (q - kv) * (h + 1) / 64


def case(generator: torch.Generator, sizes: tuple[int, ...], dtype: torch.dtype, mask: Mask, score: Any = None) -> Case:
    """Four heads on two; queries lie as a projection leaves them (B, S, H, D). With gradients of out and of LSE."""
    batch, q_len, kv_len, d, dv = sizes
    q = torch.randn(batch, q_len, 4, d, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, 2, kv_len, n, generator=generator).to(dtype) for n in (d, dv))
    dout = torch.randn(batch, 4, q_len, dv, generator=generator).to(dtype)
    dlse = torch.randn(batch, 4, q_len, generator=generator)
    return Case(q, k, v, score_mod=score, mask_mod=mask, dout=dout, dlse=dlse)


@pytest.mark.parametrize("backend", ["hopper-emulated", pytest.param("blackwell-emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "dtype", "mask", "score"),
    [
        ((1, 96, 96, 64, 64), torch.bfloat16, dilated_window((24, 24), 3), None),
        ((1, 97, 101, 64, 48), torch.bfloat16, dilated_window((24, 24), 3), of_distance),
        pytest.param(
            (2, 64, 72, 32, 32), torch.float16, dilated_window((30, 0), 4) & causal(), None, marks=pytest.mark.slow
        ),
        pytest.param((3, 40, 40, 128, 128), torch.bfloat16, dilated_window((12, 2), 2), None, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_those_of_the_whole_sequence(
    sizes: tuple[int, ...], dtype: torch.dtype, mask: Mask, score: Any, backend: str, generator: torch.Generator
) -> None:
    check(partial(ca.attention, backend=backend), case(generator, sizes, dtype, mask, score))


def test_largest_scores_and_outputs_alone_are_the_same_and_lie_as_queries_do(generator: torch.Generator) -> None:
    for length in (96, 97):
        asked = case(generator, (1, length, length, 64, 64), torch.bfloat16, dilated_window((24, 24), 3))
        call = ca.Attention(mask_mod=asked.mask_mod, backend="hopper-emulated")
        exact = ca.Attention(mask_mod=asked.mask_mod, backend="reference")
        qkv = asked.q, asked.k, asked.v
        out, lse, top = call(*qkv, return_lse=True, return_max_scores=True)
        _, _, wanted = exact(*(t.double() for t in qkv), return_lse=True, return_max_scores=True)
        torch.testing.assert_close(top.double(), wanted.double(), atol=1e-3, rtol=1e-5)
        alone = call(*qkv)
        assert torch.equal(alone, out) and lse.is_contiguous()
        assert out.transpose(1, 2).is_contiguous() and alone.transpose(1, 2).is_contiguous()


LENGTHS = torch.tensor([90])
STAYS_WHOLE: dict[str, dict[str, Any]] = {
    "another mask": {"mask_mod": causal()},
    "a tensor in the mask": {"mask_mod": dilated_window((24, 24), 3) & padding(LENGTHS)},
    "a tensor in the score": {"mask_mod": dilated_window((24, 24), 3), "score_mod": alibi(SLOPES)},
    "lengths in the mask": {"mask_mod": dilated_window((24, 24), 3) & causal("bottom_right")},
    "the batch in the mask": {"mask_mod": dilated_window((24, 24), 3) & Mask.of(lambda b, h, q, kv: q >= b)},
    "sinks": {"mask_mod": dilated_window((24, 24), 3), "sinks": torch.zeros(4)},
    "dropout": {"mask_mod": dilated_window((24, 24), 3), "dropout_p": 0.1, "dropout_seed": 0},
}


def prepared_for(problem: Problem, **mods: Any) -> FusedCall | CallApart:
    return prepared(FusedCall, problem, ca.Attention(**mods).program, 0.125, HOPPER)


def problem(batch: int, q_len: int, kv_len: int) -> Problem:
    return Problem(batch, 4, 2, q_len, kv_len, 64, 64, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("why", STAYS_WHOLE)
def test_a_call_stays_whole_where_a_mod_reads_what_is_of_the_whole_sequence(why: str) -> None:
    assert isinstance(prepared_for(problem(1, 96, 96), **STAYS_WHOLE[why]), FusedCall)


def test_it_stays_whole_where_residues_are_short_or_would_be_many_or_short_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = {"mask_mod": dilated_window((24, 24), 3)}
    by_batch = [prepared_for(problem(batch, 96, 96), **mask) for batch in (1, 4, 5)]
    assert [type(call) for call in by_batch] == [CallApart, CallApart, FusedCall]
    monkeypatch.setattr(residues, "LEAST", 33)
    assert isinstance(prepared_for(problem(1, 96, 96), **mask), FusedCall)
    monkeypatch.undo()
    wide = {"mask_mod": dilated_window((2000, 0), 4)}
    by_length = [prepared_for(problem(1, length, length), **wide) for length in (1024, 16384)]
    assert [type(call) for call in by_length] == [FusedCall, CallApart]


@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 12), (13, 12), (14, 17), (15, 15)])
def test_groups_have_every_position_once(q_len: int, kv_len: int) -> None:
    found = groups(problem(1, q_len, kv_len), 4)
    for length, of in ((q_len, "q_len"), (kv_len, "kv_len")):
        places = [r + 4 * i for g in found for r in range(g.first, g.first + g.residues) for i in range(getattr(g, of))]
        assert sorted(places) == list(range(length))
    assert found == sorted(set(found)) and all(isinstance(g, ResidueGroup) and g.residues > 0 for g in found)


def test_most_of_what_is_visited_needs_no_test() -> None:
    """Among all positions every tile has pairs of other residues."""
    mask = dilated_window((600, 0), 4)
    call = prepared_for(problem(1, 4096, 4096), mask_mod=mask)
    assert isinstance(call, CallApart) and len(call.calls) == 1
    (part,) = call.apart.calls
    (interval,) = part[1].intervals
    assert not interval.never_full
    (whole,) = ca.Attention(mask_mod=mask).program.intervals
    assert whole.never_full
