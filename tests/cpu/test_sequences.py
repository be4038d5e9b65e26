"""Packed sequences and keys in pages on the PyTorch backends: each sequence is as if it were alone."""

from __future__ import annotations

import dataclasses
import functools
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import composattn as ca
from composattn.backends import tiles
from composattn.backends.tiles import TileSizes
from composattn.mods import alibi, causal, document, sliding_window
from composattn.testing import SMALL, check, make_case, make_paged_case, make_varlen_case, random_case, run, strategies
from composattn.testing.tolerance import Case

BACKENDS = ["reference", "streaming"]
PACKED = dataclasses.replace(SMALL, layouts=("varlen", "paged"))

pytestmark = pytest.mark.usefixtures("one_thread")


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@given(strategies.cases(dataclasses.replace(SMALL, layouts=("varlen",))))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_drawn_packed_calls_are_right(case: Case) -> None:
    check(functools.partial(ca.attention, backend="streaming"), case)


@given(strategies.cases(dataclasses.replace(SMALL, layouts=("paged",))))
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_drawn_paged_calls_are_right(case: Case) -> None:
    check(functools.partial(ca.attention, backend="streaming"), case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("round_", range(2))
def test_random_calls_in_small_tiles(round_: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:packed:{round_}")
    monkeypatch.setitem(tiles.TILE_SIZES, "cpu", TileSizes(4, draw.choice((4, 8)), 1 << 19))
    for _ in range(50):
        seed = draw.randrange(2**31)
        case = random_case(seed, PACKED)
        try:
            check(functools.partial(ca.attention, backend=backend), case)
        except Exception as error:
            raise AssertionError(f"random_case({seed}, PACKED): {case}") from error


# --- the same by hand ------------------------------------------------------------------------------------------

Q_LENS, KV_LENS = (5, 0, 17, 1, 8), (9, 4, 17, 0, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_are_as_each_alone(backend: str) -> None:
    table = torch.randn(5, 4, 40, dtype=torch.float64, requires_grad=True)
    mods = {
        "score_mod": lambda s, b, h, q, kv: s + table[b, h, q - kv + 17] * (b + 1),
        "mask_mod": causal("bottom_right") | sliding_window(2),
    }
    case = make_varlen_case(3, Q_LENS, KV_LENS, heads=4, kv_heads=2, dtype=torch.float64, **mods)
    case = dataclasses.replace(case, dlse=None)  # empty rows would give their -inf to a loss by hand
    found = run(functools.partial(ca.attention, backend=backend), case)

    total = torch.zeros_like(table)
    q_start = kv_start = 0
    for b, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        rows, columns = slice(q_start, q_start + q_len), slice(kv_start, kv_start + kv_len)
        q, k, v = (
            x[at].transpose(0, 1).unsqueeze(0).requires_grad_()
            for x, at in ((case.q, rows), (case.k, columns), (case.v, columns))
        )
        of_b = {**mods, "score_mod": lambda s, _, h, q, kv, b=b: s + table[b, h, q - kv + 17] * (b + 1)}
        out, lse = ca.attention(q, k, v, **of_b, backend="reference", return_lse=True)
        dout = case.dout[rows].transpose(0, 1).unsqueeze(0)
        dq, dk, dv, dt = torch.autograd.grad(out, (q, k, v, table), dout, allow_unused=True)
        total += 0 if dt is None else dt
        torch.testing.assert_close(found["lse"][:, rows], lse[0])
        for name, alone, at in (("out", out, rows), ("dq", dq, rows), ("dk", dk, columns), ("dv", dv, columns)):
            torch.testing.assert_close(found[name][at], alone[0].transpose(0, 1))
        q_start, kv_start = q_start + q_len, kv_start + kv_len
    torch.testing.assert_close(found["d captured 0"], total)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_as_the_keys_they_hold(backend: str) -> None:
    case = make_paged_case(1, (40, 0, 16, 17), page_size=16, q_len=3, heads=6, kv_heads=2, dtype=torch.float64)
    mods = {"mask_mod": causal("bottom_right"), "score_mod": alibi(6)}
    out, lse = ca.attention(case.q, case.k, case.v, paged=case.paged, **mods, backend=backend, return_lse=True)
    for b, length in enumerate((40, 0, 16, 17)):
        pages = case.paged.page_table[b, : -(-length // 16)]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (case.k, case.v))
        alone, alone_lse = ca.attention(case.q[b : b + 1], k, v, **mods, backend="reference", return_lse=True)
        torch.testing.assert_close(out[b], alone[0])
        torch.testing.assert_close(lse[b], alone_lse[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_queries_over_pages_are_as_dense_ones(backend: str) -> None:
    case = make_paged_case(2, (33, 5), page_size=32, q_len=4)
    dense, lse = ca.attention(case.q, case.k, case.v, paged=case.paged, backend=backend, return_lse=True)
    q, varlen = case.q.transpose(1, 2).flatten(0, 1), ca.Varlen(int32(0, 4, 8))
    packed, packed_lse = ca.attention(
        q, case.k, case.v, paged=case.paged, varlen=varlen, backend=backend, return_lse=True
    )
    torch.testing.assert_close(packed.unflatten(0, (2, 4)).transpose(1, 2), dense)
    torch.testing.assert_close(packed_lse.unflatten(1, (2, 4)).transpose(0, 1), lse)


def test_packed_is_as_documents_in_one_sequence() -> None:
    lengths = (7, 30, 1, 12)
    case = make_varlen_case(0, lengths, mask_mod=causal())
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (case.q, case.k, case.v))
    as_documents = ca.attention(*rows, mask_mod=document(ids) & causal())
    packed = ca.attention(case.q, case.k, case.v, varlen=case.varlen, mask_mod=causal())
    torch.testing.assert_close(packed, as_documents[0].transpose(0, 1))


# --- what belongs to nobody ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_sequence_get_nothing_whatever_they_hold(backend: str) -> None:
    case = make_varlen_case(5, (6, 9, 0, 2), (8, 3, 4, 2), used_q=(4, 9, 0, 0), used_kv=(8, 1, 0, 0))
    assert case.q.isnan().any() and case.k.isnan().any() and case.dout.isnan().any() and case.dlse.isnan().any()
    found = run(functools.partial(ca.attention, backend=backend), case)
    rows = torch.tensor([4, 5, 15, 16])
    assert (found["out"][rows] == 0).all() and (found["dq"][rows] == 0).all()
    assert (found["lse"][:, rows] == -torch.inf).all()
    columns = torch.tensor([9, 10, 11, 12, 13, 14, 15, 16])
    assert (found["dk"][columns] == 0).all() and (found["dv"][columns] == 0).all()
    assert all(not x.isnan().any() for x in found.values())
    check(functools.partial(ca.attention, backend=backend), case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_keys_lie_as_queries_do_so_many_are_used(backend: str) -> None:
    case = make_varlen_case(6, (6, 9), used_q=(4, 5))
    assert case.varlen.cu_seqlens_k is None and case.k.isnan().any()
    check(functools.partial(ca.attention, backend=backend), case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_at_all(backend: str) -> None:
    check(functools.partial(ca.attention, backend=backend), make_varlen_case(0, (0, 0), (0, 3)))
    check(functools.partial(ca.attention, backend=backend), make_paged_case(0, (0, 0)))


# --- one prepared call -----------------------------------------------------------------------------------------


def test_new_lengths_need_no_new_plan() -> None:
    attend = ca.Attention(mask_mod=causal())
    q = torch.randn(12, 2, 8)
    for cuts in ((0, 5, 12), (0, 0, 12), (0, 11, 12)):
        attend(q, q, q, varlen=ca.Varlen(int32(*cuts)))
    assert len(attend._prepared) == 1


def test_the_form_tells_layouts_apart() -> None:
    attend = ca.Attention()
    q = torch.randn(12, 2, 8)
    cu, counts = int32(0, 5, 12), int32(5, 7)
    for varlen in (ca.Varlen(cu), ca.Varlen(cu, cu), ca.Varlen(cu, seqused_q=counts), ca.Varlen(cu, max_seqlen_q=7)):
        attend(q, q, q, varlen=varlen)
    assert len(attend._prepared) == 4


def test_a_double_backward_goes_through_packed_sequences() -> None:
    case = make_varlen_case(0, (5, 3), dtype=torch.float64, dim=4, heads=2)
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, varlen=case.varlen, mask_mod=causal())

    assert torch.autograd.gradcheck(attend, (q, k, v))
    assert torch.autograd.gradgradcheck(attend, (q, k, v))


def test_a_backward_after_lengths_were_written_to_is_refused() -> None:
    case = make_varlen_case(0, (5, 3))
    q = case.q.detach().requires_grad_()
    out = ca.attention(q, case.k, case.v, varlen=case.varlen)
    case.varlen.cu_seqlens_q.copy_(int32(0, 4, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_func_grad_goes_through_packed_sequences() -> None:
    case = make_varlen_case(0, (5, 3))

    def loss(q: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, case.k, case.v, varlen=case.varlen).sin().sum()

    q = case.q.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(case.q), wanted)


def test_autocast_takes_packed_sequences() -> None:
    case = make_varlen_case(0, (5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        out = ca.attention(case.q, case.k, case.v, varlen=case.varlen)
    halves = [x.bfloat16() for x in (case.q, case.k, case.v)]
    torch.testing.assert_close(out, ca.attention(*halves, varlen=case.varlen))


def test_the_check_sees_a_sequence_that_looks_at_its_neighbour() -> None:
    case = make_varlen_case(0, (40, 30))

    def leaky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: ca.Varlen, **more: object) -> object:
        shifted = varlen.cu_seqlens_q + int32(0, 1, 0)
        return ca.attention(q, k, v, varlen=ca.Varlen(shifted), **more)

    with pytest.raises(AssertionError, match="out is off"):
        check(leaky, case)


def test_the_check_sees_a_gradient_in_a_row_of_no_sequence() -> None:
    case = make_varlen_case(0, (4, 5), used_q=(4, 3))

    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: ca.Varlen, **more: object) -> object:
        out, lse = ca.attention(q, k, v, varlen=varlen, **more)
        return out + 1e-30 * v.detach().nan_to_num().sum(), lse

    with pytest.raises(AssertionError, match="not 0 in rows that see nothing"):
        check(results, case)


def test_dense_cases_are_still_drawn() -> None:
    assert make_case(0).varlen is None
    assert {random_case(seed).varlen for seed in range(5)} == {None}
