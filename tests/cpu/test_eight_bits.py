"""Tensors of 8 bits with their scales: each is attended to as the tensor that it stands for, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import composattn as ca
from composattn import errors
from composattn.analysis.program import Program
from composattn.backends.streaming import DerivedMods, Streaming
from composattn.call import quantized
from composattn.call.eight_bits import MANTISSAS
from composattn.call.scales import rows_of, scaled_values
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.parallel import context
from composattn.parallel.shard import refuse_eight_bits
from composattn.quantising import rotated, signs_of
from composattn.testing import Case, check, make_paged_case, make_varlen_case
from tests.rooms import ROOT
from tests.support import outlier_normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
B, HQ, H, S, D, DV = 2, 4, 2, 100, 32, 16
BACKENDS = ("reference", "streaming")
MODS: dict[str, Any] = {"score_mod": alibi(HQ) >> softcap(5.0), "mask_mod": causal() & sliding_window(60)}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return outlier_normal(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bytes_of(*shape: int, seed: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return drawn(*shape, seed=seed).clamp(-400, 400).to(dtype)


def scales(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


# the shape of a scale of k, and the same so that it broadcasts to (B, H, S, D)
OF_K: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a number": ((), lambda s: s),
    "vLLM's (1,)": ((1,), lambda s: s),
    "(Hkv,)": ((H,), lambda s: s.view(1, H, 1, 1)),
    "FA3's and torch's (B, Hkv)": ((B, H), lambda s: s.view(B, H, 1, 1)),
    "cuDNN's (1, 1, 1, 1)": ((1, 1, 1, 1), lambda s: s),
    "(B, 1)": ((B, 1), lambda s: s.view(B, 1, 1, 1)),
    "of rows": ((B, H, S), lambda s: s.unsqueeze(-1)),
    "of rows, as amax keeps them": ((B, H, S, 1), lambda s: s),
    "of blocks of 16 rows": ((B, H, 7), lambda s: s.repeat_interleave(16, 2)[:, :, :S, None]),
    "of blocks of 64 rows": ((B, H, 2, 1), lambda s: s.repeat_interleave(64, 2)[:, :, :S]),
}
OF_V = {name: how for name, how in OF_K.items() if name != "of blocks of 16 rows"} | {
    "of channels": ((B, H, DV), lambda s: s.unsqueeze(2)),
    "of channels, as amax keeps them": ((B, H, 1, DV), lambda s: s),
}


def assert_same(found: Any, exact: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """`found` (out, lse) is `exact`, in fp64, but for its rounding."""
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].double(), exact[0], rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=3e-5)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-6, atol=3e-6)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Any:
    return ca.attention(q.double(), k.double(), v.double(), backend="reference", return_lse=True, **how)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", OF_K)
def test_a_scale_of_k_multiplies_scores_before_the_score_mod(shape: str, kind: torch.dtype, backend: str) -> None:
    q, k, v = (
        drawn(B, HQ, S, D, dtype=torch.bfloat16),
        bytes_of(B, H, S, D, seed=1, dtype=kind),
        bytes_of(B, H, S, DV, seed=2),
    )
    size, spread = OF_K[shape]
    k_scale = scales(*size)
    found = ca.attention(q, k, v, k_scale=k_scale, return_lse=True, backend=backend, **MODS)
    assert_same(found, exact(q, k.double() * spread(k_scale), v, **MODS))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", OF_V)
def test_a_scale_of_v_multiplies_the_output(shape: str, backend: str) -> None:
    q, k, v = drawn(B, HQ, S, D, dtype=torch.bfloat16), bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    size, spread = OF_V[shape]
    v_scale = scales(*size)
    found = ca.attention(q, k, v, v_scale=v_scale, return_lse=True, backend=backend, **MODS)
    assert_same(found, exact(q, k, v.double() * spread(v_scale), **MODS))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(), (HQ,), (H,), (B, HQ), (B, H), (B, HQ, S), (B, HQ, 4)], ids=str)
def test_queries_of_8_bits_give_an_output_of_the_type_asked_for(
    size: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    q, k, v = bytes_of(B, HQ, S, D, seed=0), bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    q_scale, k_scale, v_scale = scales(*size), scales(B, H, seed=8), scales(B, H, seed=9)
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "out_dtype": dtype}
    found = ca.attention(q, k, v, **given, return_lse=True, backend=backend, **MODS)
    of_q = q_scale
    if size[-1:] == (H,):
        of_q = q_scale.repeat_interleave(HQ // H, -1)
    if len(size) < 3:
        of_q = of_q.unsqueeze(-1).unsqueeze(-1) if size else of_q
    else:
        of_q = of_q.repeat_interleave(1 if size[2] == S else 32, 2)[:, :, :S, None]
    wide = q.double() * of_q, k.double() * k_scale[..., None, None], v.double() * v_scale[..., None, None]
    assert_same(found, exact(*wide, **MODS), dtype)


def test_queries_of_8_bits_give_bf16_where_nothing_else_is_asked_for() -> None:
    q, k, v = (bytes_of(1, 2, 8, 16, seed=n) for n in range(3))
    assert ca.attention(q, k, v, q_scale=0.5).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(H,), (3, H), "rows", "rows with a 1"], ids=str)
def test_packed_sequences_have_scales_of_their_own(size: Any, backend: str) -> None:
    case = make_varlen_case(0, (40, 0, 17), (50, 5, 17), heads=HQ, kv_heads=H, dtype=torch.bfloat16)
    k, v = case.k.float().to(E4M3), case.v.float().to(E4M3)
    total = k.shape[0]
    size = {"rows": (total, H), "rows with a 1": (total, H, 1)}.get(size, size)
    k_scale, v_scale = scales(*size), scales(*size, seed=8)
    mods: dict[str, Any] = {"varlen": case.varlen, "score_mod": softcap(5.0), "mask_mod": causal()}
    found = ca.attention(case.q, k, v, k_scale=k_scale, v_scale=v_scale, return_lse=True, backend=backend, **mods)
    if size == (3, H):
        of_rows = torch.tensor([0] * 50 + [1] * 5 + [2] * 17)
        k_scale, v_scale = k_scale[of_rows], v_scale[of_rows]
    spread_k, spread_v = (s.view(-1, H, 1) for s in (k_scale, v_scale))
    assert_same(found, exact(case.q, k.double() * spread_k, v.double() * spread_v, **mods))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(), (H,), "sequences", "rows", "pages"], ids=str)
def test_pages_of_keys_have_pages_of_scales_beside_them(size: Any, backend: str) -> None:
    case = make_paged_case(0, (50, 0, 17), q_len=3, heads=HQ, kv_heads=H, dtype=torch.bfloat16)
    assert case.paged is not None
    k, v = case.k.float().to(E4M3), case.v.float().to(E4M3)
    pages, page = k.shape[0], case.paged.page_size
    size = {"rows": (pages, H, page), "pages": (pages, H, 1), "sequences": (3, H)}.get(size, size)
    k_scale, v_scale = scales(*size), scales(*size, seed=8)
    mods: dict[str, Any] = {"paged": case.paged, "score_mod": softcap(5.0)}
    found = ca.attention(case.q, k, v, k_scale=k_scale, v_scale=v_scale, return_lse=True, backend=backend, **mods)
    if size == (3, H):  # by sequences, so each alone
        for b in range(3):
            one = ca.Paged(case.paged.page_table[b : b + 1], page, case.paged.seqused[b : b + 1])
            wide = (x.double() * s[b].view(1, H, 1, 1) for x, s in ((k, k_scale), (v, v_scale)))
            alone = exact(case.q[b : b + 1], *wide, paged=one, score_mod=softcap(5.0))
            assert_same((found[0][b : b + 1], found[1][b : b + 1]), alone)
        return
    spread_k, spread_v = (s.unsqueeze(-1) if s.ndim == 3 else s.view(-1, 1, 1) for s in (k_scale, v_scale))
    assert_same(found, exact(case.q, k.double() * spread_k, v.double() * spread_v, **mods))


def test_pages_of_8_bits_grow_with_scales_of_their_rows() -> None:
    page, n = 16, 21
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    caches = [ca.Quantized(torch.zeros(4, H, page, D).to(E4M3), torch.ones(4, H, page)) for _ in range(2)]
    paged = ca.Paged(table, page, torch.zeros(2, dtype=torch.int32))
    k, v = drawn(2, H, n, D, seed=1), 50 * drawn(2, H, n, D, seed=2)
    for part in (slice(0, 5), slice(5, n)):
        paged = paged.append(*caches, k[:, :, part], v[:, :, part])
    q = drawn(2, HQ, 1, D, dtype=torch.bfloat16)
    found = ca.attention(q, *caches, paged=paged, return_lse=True)
    one = ca.quantize(q, k, v, scale="token", hadamard=False, center=False)
    assert_same(found, exact(q, one.k.dequantised(torch.float64), one.v.dequantised(torch.float64)))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e8m0fnu], ids=str
)
def test_rows_that_grow_leave_what_their_pages_had(dtype: torch.dtype) -> None:
    """Each append is larger than the last, begins within a page and ends within one; packed, of other lengths."""
    page, begins = 16, torch.tensor([0, 3, 3, 24], dtype=torch.int32)
    table = torch.tensor([[7, 0, 4], [1, 1, 1], [2, 6, 5]], dtype=torch.int32)
    caches = [ca.Quantized(torch.zeros(8, H, page, D).to(E4M3), torch.ones(8, H, page).to(dtype)) for _ in range(2)]
    paged, held = ca.Paged(table, page, torch.zeros(3, dtype=torch.int32)), [[], [], []]  # type: ignore[var-annotated]
    for step in range(2):
        k, v = (10.0**step * drawn(24, H, D, seed=n) for n in (2 * step, 2 * step + 1))
        paged = paged.append(*caches, k, v, varlen=ca.Varlen(begins))
        for b, rows in enumerate(held):
            rows.append((k[begins[b] : begins[b + 1]], v[begins[b] : begins[b + 1]]))
    assert paged.seqused.tolist() == [6, 0, 42]
    for b, rows in enumerate(held):
        for cache, parts in zip(caches, zip(*rows, strict=True), strict=True):
            wanted = torch.cat(parts).transpose(0, 1)
            lie = (cache.data.float() * cache.scale.float().unsqueeze(-1))[table[b].long()]
            found = lie.transpose(0, 1).flatten(1, 2)[:, : len(wanted[0])]
            assert ((found - wanted).abs() <= 2**-4 * wanted.abs() + 2**-16 * wanted.abs().amax(-1, keepdim=True)).all()
    q = drawn(3, HQ, 1, D, dtype=torch.bfloat16)
    assert ca.attention(q, *caches, paged=paged).isfinite().all()


@pytest.mark.parametrize("scale", [0.5, None, torch.tensor(0.25), torch.tensor([0.25, 0.5])], ids=str)
def test_pages_of_8_bits_grow_by_the_scale_that_they_have(scale: Any) -> None:
    cache = ca.Quantized(torch.zeros(2, H, 16, D).to(E4M3), scale)
    paged = ca.Paged(torch.tensor([[1, 0]], dtype=torch.int32), 16, torch.zeros(1, dtype=torch.int32))
    k = drawn(1, H, 20, D, seed=1)
    k[0, 0, 0, 0] = 1e4  # beyond any scale here: the largest number, not NaN
    grown = paged.append(cache, ca.Quantized(cache.data.clone(), scale), k, k)
    assert grown.seqused.tolist() == [20]
    of_heads = torch.as_tensor(1.0 if scale is None else scale).view(-1, 1)
    rows = torch.cat((cache.data[1].float(), cache.data[0].float()), 1)[:, :20]
    torch.testing.assert_close(rows, (k[0] / of_heads.unsqueeze(-1)).clamp(-448, 448).to(E4M3).float(), rtol=0, atol=0)


def test_streaming_makes_tiles_wide_and_never_all_keys() -> None:
    keys = 8192
    q = drawn(1, 1, 300, 64, dtype=torch.bfloat16)
    k, v = (bytes_of(1, 1, keys, 64, seed=n) for n in (1, 2))

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
                self.numbers = max(self.numbers, found.numel())
            return found

    call = Streaming(
        DerivedMods(Program(values=scaled_values(rows_of(q, k, v, None, None)[2], scales(1, 1)).expr), 0.125)
    )
    with Largest() as seen:
        out = call.forward(q, k, v, call.captures)[0]
    assert 0 < seen.numbers <= keys * 64 // 4
    torch.testing.assert_close(
        out.double(), exact(q, k, v.double() * float(scales(1, 1)), scale=0.125)[0], rtol=1e-4, atol=1e-4
    )


# --- ca.quantize -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["head", "block", "token"])
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [32, 96, 40], ids=lambda d: f"D{d}")
def test_quantised_inputs_are_what_they_stand_for(scale: Any, kind: torch.dtype, dim: int) -> None:
    q, k, v = (drawn(B, h, S, dim, seed=n, dtype=torch.bfloat16) for n, h in enumerate((HQ, H, H)))
    made = ca.quantize(q, k + 3, v, scale=scale, dtype=kind)
    found = ca.attention(*made, return_lse=True, sinks=torch.ones(HQ), **MODS)
    wide = [x.dequantised(torch.float64) for x in made]
    wide[1] = wide[1] + made.k.mean
    assert_same(found, exact(*wide, sinks=torch.ones(HQ), **MODS))
    # and near what was given: rotated back by nothing, as q·k is the same
    near = exact(q, k + 3, v, sinks=torch.ones(HQ), **MODS)
    assert float((found[1] - near[1]).abs().mean()) < (0.08 if kind is E4M3 else 0.16)


def test_the_rotation_leaves_scores_as_they_are() -> None:
    q, k = (drawn(1, 1, 64, 96, seed=n, dtype=torch.float64) for n in range(2))
    signs = signs_of(96, q.device)
    torch.testing.assert_close(rotated(q, signs) @ rotated(k, signs).mT, q @ k.mT)
    outlier = torch.zeros(96)
    outlier[5] = 100.0
    assert float(rotated(outlier, signs).abs().max()) < 18  # of 100/sqrt(32)
    shared = torch.ones(32)
    assert float(rotated(shared, signs).abs().max()) < 1.5  # without signs all of it, sqrt(32), is in the first channel


@pytest.mark.parametrize("scale", ["head", "block", "token"])
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_scales_that_are_no_powers_of_two_round_better_and_stay_exact(scale: Any, kind: torch.dtype) -> None:
    given = [drawn(2, 2, 60, 32, seed=n, dtype=torch.bfloat16) for n in range(3)]
    how: dict[str, Any] = {"scale": scale, "block": 16, "dtype": kind, "hadamard": False, "center": False}
    errors_of = []
    for power_of_two in (True, False):
        made = ca.quantize(*given, power_of_two=power_of_two, **how)
        errors_of.append([float((x.dequantised() - t).float().norm()) for x, t in zip(made, given, strict=True)])
        for x in made:
            assert torch.equal(x.dequantised().double(), x.dequantised(torch.float64))
            assert (x.data.float().abs() <= torch.finfo(kind).max).all()
            if not power_of_two:
                assert set((torch.frexp(x.scale)[0] * 2).flatten().tolist()) <= set(MANTISSAS)
    assert all(best < plain for plain, best in zip(*errors_of, strict=True))


def test_a_row_far_longer_than_others_leaves_them_their_digits() -> None:
    """The scale of a head fits the longest row, however it is rotated."""
    q, k, v = (drawn(1, 1, 200, 128, seed=n) for n in range(3))
    q[:, :, 7] *= 300.0
    by_head, by_row = (ca.quantize(q, k, v, scale=scale).q for scale in ("head", "token"))  # type: ignore[arg-type]
    assert by_head.data.float().abs().max() < torch.finfo(E4M3).max
    exact = rotated(q, signs_of(128, q.device))
    others = [float((x.dequantised(torch.float32) - exact)[:, :, 8:].norm()) for x in (by_head, by_row)]
    assert others[0] <= 1.02 * others[1]


def test_scales_that_are_powers_of_two_make_dequantised_16_bits_exact() -> None:
    made = ca.quantize(*(drawn(1, 2, 64, 32, seed=n, dtype=torch.bfloat16) for n in range(3)), scale="token")
    for x in made:
        assert x.scale is not None and torch.equal(x.scale, torch.exp2(torch.log2(x.scale).round()))
        assert torch.equal(x.dequantised().double(), x.dequantised(torch.float64))


def test_the_mean_of_keys_is_given_back_where_scores_are_seen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (drawn(B, h, S, D, seed=n, dtype=torch.bfloat16) for n, h in enumerate((HQ, H, H)))
    made = ca.quantize(q, k + 3, v)
    wanted, _ = ca.attention(*made, mask_mod=causal(), return_lse=True)
    added, _ = ca.attention(*made, score_mod=alibi(HQ), return_lse=True)
    monkeypatch.setattr(quantized, "_times_mean", lambda *_: pytest.fail("a pass over q for nobody"))
    torch.testing.assert_close(ca.attention(*made, mask_mod=causal()), wanted)
    torch.testing.assert_close(ca.Attention(mask_mod=causal())(*made), wanted)
    torch.testing.assert_close(
        ca.attention(*made, score_mod=alibi(HQ)), added
    )  # which adds, so what all have in common stays in common
    who: list[dict[str, Any]] = [{"return_lse": True}, {"return_max_scores": True}]
    for seen in [*who, {"sinks": torch.ones(HQ)}, {"score_mod": softcap(5.0)}]:
        with pytest.raises(pytest.fail.Exception):
            ca.attention(*made, **seen)


def test_packed_rows_are_quantised_by_head_or_by_row() -> None:
    case = make_varlen_case(0, (40, 8, 17), heads=HQ, kv_heads=H, dtype=torch.bfloat16)
    for scale in ("head", "token"):
        made = ca.quantize(case.q, case.k, case.v, scale=scale)
        found = ca.attention(*made, varlen=case.varlen, return_lse=True, mask_mod=causal())
        wide = [x.dequantised(torch.float64) for x in made]
        wide[1] = wide[1] + made.k.mean[0].transpose(0, 1)
        assert_same(found, exact(*wide, varlen=case.varlen, mask_mod=causal()))


def test_packed_rows_of_as_many_sequences_have_scales_of_rows() -> None:
    case = make_varlen_case(0, (40, 8, 17), (1, 0, 2), heads=HQ, kv_heads=H, dtype=torch.bfloat16)
    made = ca.quantize(case.q, case.k, case.v, scale="token", center=False)
    found = ca.attention(*made, varlen=case.varlen, return_lse=True)
    assert_same(found, exact(*(x.dequantised(torch.float64) for x in made), varlen=case.varlen))


@pytest.mark.parametrize("scale", ["head", "block", "token"])
@pytest.mark.parametrize("better", [True, False], ids=["powers", "any"])
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_no_rows_are_quantised_too(scale: Any, better: bool, lengths: tuple[int, int]) -> None:
    shapes = ((1, HQ, lengths[0], D), (1, H, lengths[1], D), (1, H, lengths[1], D))
    made = ca.quantize(*(drawn(*shape) for shape in shapes), scale=scale, power_of_two=better)
    out, lse = ca.attention(*made, return_lse=True)
    assert out.shape == shapes[0] and (lengths[1] or (not out.any() and lse.isneginf().all()))


def test_a_block_longer_than_all_rows_is_one_block() -> None:
    given = [drawn(1, 2, n, 16, seed=n) for n in (70, 70, 70)]
    huge, one = (ca.quantize(*given, scale="block", block=size) for size in (2**40, 128))
    for found, wanted in zip(huge, one, strict=True):
        assert torch.equal(found.data.float(), wanted.data.float()) and torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("size", [(0,), (1, H, 0)], ids=str)
def test_a_scale_of_nothing_is_no_scale_of_rows(name: str, size: tuple[int, ...]) -> None:
    rows = bytes_of(1, H, 3, 16, seed=0)
    with pytest.raises(errors.ShapeMismatch, match=f"{name}_scale has shape"):
        ca.attention(rows, rows, rows, **{f"{name}_scale": torch.ones(size)})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mods", [{}, MODS], ids=["plain", "mods"])
def test_gradients_go_straight_through_the_rounding(mods: dict[str, Any], backend: str) -> None:
    given = [drawn(B, h, S, d, seed=n).requires_grad_() for n, (h, d) in enumerate(((HQ, D), (H, D), (H, DV)))]
    made = ca.quantize(*given, hadamard=False)
    out = ca.attention(*made, backend=backend, **mods)
    dout = drawn(*out.shape, seed=9)
    found = torch.autograd.grad(out, given, dout)
    leaves = [x.dequantised(torch.float64).detach() for x in made]
    leaves[1] += made.k.mean
    leaves = [x.requires_grad_() for x in leaves]
    wanted = torch.autograd.grad(ca.attention(*leaves, backend="reference", **mods), leaves, dout.double())
    for g, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=2e-5)


def test_gradients_are_those_of_16_bits_on_the_dequantised_bit_for_bit() -> None:
    given = [drawn(1, 2, S, D, seed=n, dtype=torch.bfloat16).requires_grad_() for n in range(3)]
    made = ca.quantize(*given, hadamard=False, center=False)
    found = torch.autograd.grad(ca.attention(*made, mask_mod=causal()).float().sum(), given)
    leaves = [x.dequantised().detach().requires_grad_() for x in made]
    wanted = torch.autograd.grad(ca.attention(*leaves, mask_mod=causal()).float().sum(), leaves)
    assert all(torch.equal(g, w) for g, w in zip(found, wanted, strict=True))


def test_transforms_of_torch_func_go_through_quantising() -> None:
    given = [drawn(3, B, h, 20, 16, seed=n) for n, h in enumerate((HQ, H, H))]

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ca.attention(*ca.quantize(q, k, v), mask_mod=causal()).float().square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*given)
    for n in range(3):
        leaves = [x[n].clone().requires_grad_() for x in given]
        for g, w in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(g[n], w, rtol=1e-4, atol=1e-5)


def test_wide_queries_and_scales_of_k_learn_beside_keys_of_8_bits() -> None:
    q = drawn(B, HQ, S, D).requires_grad_()
    k, v = bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    k_scale = scales(B, H).requires_grad_()
    found = torch.autograd.grad(ca.attention(q, k, v, k_scale=k_scale, v_scale=2.0, **MODS).sum(), (q, k_scale))
    leaves = [q.detach().double().requires_grad_(), k_scale.detach().double().requires_grad_()]
    out = exact(leaves[0], k.double() * leaves[1][..., None, None], v.double() * 2, **MODS)[0]
    for g, w in zip(found, torch.autograd.grad(out.sum(), leaves), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-4)


# --- where calls come from ---------------------------------------------------------------------------------------


def test_an_attention_that_is_planned_once_takes_them() -> None:
    q, k, v = (drawn(B, h, S, D, seed=n, dtype=torch.bfloat16) for n, h in enumerate((HQ, H, H)))
    made = ca.quantize(q, k, v)
    held = ca.Attention(sinks=torch.ones(HQ), dropout_p=0.1, dropout_seed=3, **MODS)
    wanted = ca.attention(*made, sinks=torch.ones(HQ), dropout_p=0.1, dropout_seed=3, **MODS)
    assert torch.equal(held(*made), wanted)
    assert torch.equal(held(q, made.k.data, made.v.data, k_scale=made.k.scale), ca.attention(
        q, made.k.data, made.v.data, k_scale=made.k.scale, sinks=torch.ones(HQ), dropout_p=0.1, dropout_seed=3, **MODS
    ))  # fmt: skip


def test_a_call_of_the_same_form_plans_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from composattn.dispatch.planned import Planned

    q, k, v = drawn(B, HQ, S, D, dtype=torch.bfloat16), bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    one, other = scales(B, H, seed=1), scales(B, H, seed=2)
    first = ca.attention(q, k, v, k_scale=one, v_scale=other, **MODS)
    monkeypatch.setattr(Planned, "_plan", lambda *_: pytest.fail("planned again"))
    assert torch.equal(ca.attention(q, k, v, k_scale=one, v_scale=other, **MODS), first)


def test_explain_says_which_entry_of_a_scale_is_read() -> None:
    q, k, v = (drawn(B, h, S, D, seed=n, dtype=torch.bfloat16) for n, h in enumerate((HQ, H, H)))
    made = ca.quantize(q, k, v, scale="block", block=16, center=False)
    said = str(ca.Attention(mask_mod=causal(), score_mod=softcap(30.0)).explain(*made))
    assert "bfloat16 float8_e4m3fn on cpu" in said
    assert "30·tanh(s·t0[b, h // 2, kv // 16, 0]·t1[b, h, q // 16, 0] / 30)" in said
    assert "v times t2[b, h // 2, kv // 16, 0]" in said


def test_vmap_maps_over_tensors_of_8_bits_and_their_scales() -> None:
    q = drawn(3, B, HQ, S, D, dtype=torch.bfloat16)
    k, v = bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    k_scale, v_scale = scales(3, B, H), scales(3, B, H, seed=8)
    call = lambda q, k_scale, v_scale: ca.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **MODS)  # noqa: E731
    found = torch.vmap(call)(q, k_scale, v_scale)
    wanted = torch.stack([call(*each) for each in zip(q, k_scale, v_scale, strict=True)])
    torch.testing.assert_close(found, wanted)


def test_compiled_regions_and_exported_programs_take_them() -> None:
    q, k, v = (drawn(B, h, S, D, seed=n, dtype=torch.bfloat16) for n, h in enumerate((HQ, H, H)))
    given = q, k.to(E4M3), v.to(E4M3), scales(B, H), scales(B, H, seed=8)

    def call(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> Any:
        return ca.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, score_mod=softcap(5.0), mask_mod=causal())

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return call(*tensors)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(*given), call(*given))
    assert torch.equal(torch.export.export(Module(), given).module()(*given), call(*given))


@pytest.mark.parametrize("learns", [True, False])
def test_a_compiled_region_quantises(learns: bool) -> None:
    given = [drawn(B, h, S, D, seed=n).requires_grad_(learns) for n, h in enumerate((HQ, H, H))]
    call = lambda q, k, v: ca.attention(*ca.quantize(q, k, v), mask_mod=causal())  # noqa: E731
    torch._dynamo.reset()
    results = []
    for way in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = way(*given)
        results.append((out, *(torch.autograd.grad(out.sum(), given) if learns else ())))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_8_bits_as_they_are() -> None:
    q, k, v = drawn(B, HQ, S, D), bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        found = ca.attention(q, k, v, k_scale=0.5)
        quantised = ca.quantize(q, q[:, :H], q[:, :H])
    assert torch.equal(found, ca.attention(q.bfloat16(), k, v, k_scale=0.5))
    for inside, outside in zip(quantised, ca.quantize(q, q[:, :H], q[:, :H]), strict=True):
        assert torch.equal(inside.data.view(torch.uint8), outside.data.view(torch.uint8))


def test_a_directional_derivative_goes_through_scales() -> None:
    q = drawn(1, 2, 16, 8, dtype=torch.float64)
    k, v = bytes_of(1, 2, 16, 8, seed=1), bytes_of(1, 2, 16, 8, seed=2)
    call = lambda q: ca.attention(q, k, v, k_scale=scales(2), v_scale=scales(1, 2))  # noqa: E731
    along = drawn(1, 2, 16, 8, seed=3, dtype=torch.float64)
    found = torch.func.jvp(call, (q,), (along,))[1]
    torch.testing.assert_close(found, (call(q + 1e-5 * along) - call(q - 1e-5 * along)) / 2e-5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["packed", "paged"])
def test_reads_of_scales_are_inside_of_them(layout: str) -> None:
    with ca.debug_checks(True):
        if layout == "packed":
            case = make_varlen_case(0, (40, 0, 17), (50, 5, 17), heads=HQ, kv_heads=H, dtype=torch.bfloat16)
        else:
            case = make_paged_case(0, (50, 0, 17), q_len=3, heads=HQ, kv_heads=H, dtype=torch.bfloat16)
        k, v = case.k.float().to(E4M3), case.v.float().to(E4M3)
        where = {"varlen": case.varlen, "paged": case.paged}
        of_rows = {"k_scale": scales(*k.shape[:-1], 1), "v_scale": scales(*v.shape[:-1], 1)}
        assert ca.attention(case.q, k, v, **where, **of_rows).isfinite().all()


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_other_names_of_scales_say_what_they_are_called_here(name: str) -> None:
    q = drawn(1, 1, 4, 8)
    with refused(errors.UnknownKeyword, name, f"called {name[0]}_scale here"):
        ca.attention(q, q, q, **{name: 1.0})


@pytest.mark.parametrize("backend", ["hopper", "blackwell-emulated"])
def test_generated_kernels_refuse_8_bits_by_name(backend: str) -> None:
    pytest.importorskip("cutlass")
    q, k, v = drawn(1, 2, 64, 64, dtype=torch.bfloat16), bytes_of(1, 2, 64, 64, seed=1), bytes_of(1, 2, 64, 64, seed=2)
    refused = errors.BackendUnavailable if backend == "hopper" else errors.UnsupportedDType
    with pytest.raises(refused) as said:
        ca.attention(q, k, v, k_scale=0.5, backend=backend)
    if backend != "hopper":
        assert "no kernel on" in str(said.value) and "dequantised" in str(said.value)
    given = ca.Quantized(k, torch.tensor(0.5)).dequantised(), ca.Quantized(v).dequantised()
    assert given[0].dtype == torch.bfloat16  # what the message says is taken


def test_ranks_that_share_a_sequence_refuse_8_bits_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(1, 2, 8, 16), bytes_of(1, 2, 8, 16, seed=1)
    monkeypatch.setattr(context, "entered", [None])
    with refused(errors.UnsupportedInParallel, "dequantised"):
        ca.attention(q, ca.Quantized(k), k)
    with refused(errors.UnsupportedInParallel, "dequantised"):
        ca.Attention()(q, k, k, k_scale=0.5)
    with refused(errors.UnsupportedInParallel, "dequantised"):
        refuse_eight_bits((k.dtype, k.dtype))
    refuse_eight_bits((torch.bfloat16,) * 4)


def refused(kind: type[Exception], *said: str) -> Any:
    return pytest.raises(kind, match=".*".join(said))


def test_what_cannot_be_meant_is_refused_by_name() -> None:
    q, k, v = drawn(B, HQ, S, D, dtype=torch.bfloat16), bytes_of(B, H, S, D, seed=1), bytes_of(B, H, S, DV, seed=2)
    wide = k.bfloat16()
    with refused(errors.ShapeMismatch, "k_scale has shape \\(3,\\)", "\\(Hkv,\\)"):
        ca.attention(q, k, v, k_scale=scales(3))
    with refused(errors.ShapeMismatch, "may count", "a dimension of 1"):
        ca.attention(q[:, :, :D], k[:, :, :D], k[:, :, :D], v_scale=scales(B, H, D))
    with refused(errors.UnsupportedOption, "k_scale is of 8-bit tensors", "multiply k by it"):
        ca.attention(q, wide, wide, k_scale=scales(H))
    with refused(errors.UnsupportedOption, "out_dtype", "cast it"):
        ca.attention(q, k, v, out_dtype=torch.float32)
    with refused(errors.UnsupportedOption, "out_dtype is torch.int32"):
        ca.attention(bytes_of(B, HQ, S, D, seed=0), k, v, out_dtype=torch.int32)
    with refused(errors.UnsupportedOption, "leave k_scale out"):
        ca.attention(q, ca.Quantized(k, scales(H)), v, k_scale=scales(H))
    with refused(errors.DTypeMismatch, "or k and v 8 bits"):
        ca.attention(q, k, wide)
    with refused(errors.UnsupportedDType, "out_dtype="):
        ca.attention(k, k, k)
    with refused(errors.UnsupportedDType, "pass floats"):
        ca.attention(q, k, v, k_scale=torch.ones(H, dtype=torch.int32))
    with refused(errors.NotATensor, "k_scale is a list"):
        ca.attention(q, k, v, k_scale=[1.0])  # type: ignore[arg-type]
    with refused(errors.GradientUnsupported, "ca.quantize"):
        ca.attention(q, k.clone().requires_grad_(), v)
    with refused(errors.GradientUnsupported, "ca.quantize"):
        ca.attention(q, k.clone().requires_grad_(), v, k_scale=0.5)
    with refused(errors.GradientUnsupported, "v_scale has no gradient"):
        ca.attention(q, k, v, v_scale=scales(H).requires_grad_())
    with refused(errors.EmptyDimension, "only the length may be zero"):
        ca.quantize(*(drawn(1, 1, 4, 0),) * 3)
    with refused(errors.DeviceMismatch, "one device"):
        ca.quantize(drawn(1, 1, 4, 8), drawn(1, 1, 4, 8).to("meta"), drawn(1, 1, 4, 8))
    with refused(errors.UnsupportedHeadDim, "hadamard=False"):
        ca.quantize(*(drawn(1, 1, 4, 5),) * 3)
    with refused(errors.UnsupportedOption, '"head", "block" or "token"'):
        ca.quantize(*(drawn(1, 1, 4, 8),) * 3, scale="channel")  # type: ignore[arg-type]
    with refused(errors.UnsupportedBlockSize, "power of two"):
        ca.quantize(*(drawn(1, 1, 4, 8),) * 3, scale="block", block=48)
    with refused(errors.UnsupportedOption, "blocks of packed rows"):
        ca.quantize(*(drawn(4, 1, 8),) * 3, scale="block")
    with refused(errors.UnsupportedDType, "16 bits or more"):
        ca.quantize(q, k, v)
    cache = ca.Quantized(torch.zeros(2, H, 16, D).to(E4M3), torch.ones(2, H, 1))
    paged = ca.Paged(torch.tensor([[1, 0]], dtype=torch.int32), 16, torch.zeros(1, dtype=torch.int32))
    with refused(errors.UnsupportedOption, "one of each row"):
        paged.append(cache, cache, drawn(1, H, 1, D), drawn(1, H, 1, D))
    with refused(errors.UnsupportedOption, "the cache has \\(3,\\)"):
        paged.append(cache._replace(scale=scales(3)), cache, drawn(1, H, 1, D), drawn(1, H, 1, D))
    with refused(errors.UnsupportedDType, "float8_e4m3fn or float8_e5m2"):
        ca.attention(q, k.view(torch.uint8), v.view(torch.uint8), k_scale=1.0)
    with refused(errors.DTypeMismatch, "float8_e4m3fn or float8_e5m2"):
        ca.attention(q, k.view(torch.uint8), v.view(torch.uint8))
    for large in (1e39, 10**400, float("nan")):
        with refused(errors.InvalidScale, "3.4e38"):
            ca.attention(q, k, v, k_scale=large)
    for mean in (drawn(B, H, D), drawn(B, HQ, 1, D), 1.0):
        with refused(errors.ShapeMismatch, f"must be {(B, H, 1, D)}".replace("(", "\\(").replace(")", "\\)")):
            ca.attention(q, ca.Quantized(k, None, mean), v, return_lse=True)  # type: ignore[arg-type]
    with refused(errors.UnsupportedOption, "only k may have"):
        ca.attention(q, k, ca.Quantized(v, None, drawn(B, H, 1, DV)))
    turned, plain = (ca.quantize(q, wide, wide, hadamard=hadamard) for hadamard in (True, False))
    for others in ((q, turned.k), (turned.q, plain.k), (plain.q, turned.k), (turned.q, ca.Quantized(k))):
        with refused(errors.UnsupportedOption, "hadamard=False"):
            ca.attention(*others, v)
    with refused(errors.NotATensor, "k's data"):
        ca.attention(q, ca.Quantized(None), v)  # type: ignore[arg-type]


# --- the tolerance rule ------------------------------------------------------------------------------------------


def kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, offset: float = 8.0, threshold: float = 0.0, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel for 8 bits computes: P as e4m3 at 2^offset by a maximum that is `threshold` behind, fp32 sums."""
    q_scale, k_scale, v_scale = (given[name].unsqueeze(-1).unsqueeze(-1) for name in ("q_scale", "k_scale", "v_scale"))
    scores = (q.double() @ k.double().mT) * q_scale * k_scale * q.shape[-1] ** -0.5
    top = scores.amax(-1, keepdim=True) - threshold * 0.6931471805599453
    p = torch.exp(scores - top) * 2.0**offset
    total = p.sum(-1, keepdim=True)
    out = (p.clamp(max=448).to(E4M3).double() @ v.double()) * v_scale / total
    return out.to(given["out_dtype"]), torch.logsumexp(scores, -1).float()


def eight_bit_case(spread: float = 1.0, mean: float = 0.0) -> Case:
    q, k, v = (drawn(B, 2, 200, 64, seed=n) for n in range(3))
    made = ca.quantize(spread * q, k, v + mean, center=False, power_of_two=False)
    of = tuple(x.scale[:, :, 0, 0] for x in made if x.scale is not None)
    return Case(*(x.data for x in made), scales=of, out_dtype=torch.bfloat16)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [eight_bit_case(), eight_bit_case(6.0), eight_bit_case(1.0, 1.0)], ids=str)
def test_the_rule_takes_what_rounding_p_to_8_bits_costs(case: Case) -> None:
    check(kernel, case)
    check(ca.attention, case)
    check(
        lambda *t, **how: kernel(*t, **how, offset=4.0, threshold=4.0), case
    )  # 8 + 0 and 4 + 4 bits fit into e4m3's 8.8


def test_the_rule_finds_what_is_lost_beyond_that() -> None:
    case = eight_bit_case()
    with pytest.raises(AssertionError, match="out is off"):  # P above 448 is cut, without a word
        check(lambda *t, **how: kernel(*t, **how, threshold=2.0), case)
    q_scale, k_scale, v_scale = case.scales
    other = dataclasses.replace(case, scales=(q_scale, k_scale * torch.tensor([1.0, 1.1]), v_scale))
    for scales_of_others in ((q_scale, other.scales[1], v_scale), (q_scale, k_scale, 1.05 * v_scale)):
        names = ("q_scale", "k_scale", "v_scale")
        wrong = dict(zip(names, scales_of_others, strict=True))
        with pytest.raises(AssertionError, match="is off"):
            check(lambda *t, wrong=wrong, **how: ca.attention(*t, **{**how, **wrong}), case)


def test_the_page_shows_the_figures_of_the_run() -> None:
    from benchmarks.eight_bits import tables

    kept = json.loads((ROOT / "benchmarks/results/eight-bits/cpu.json").read_text())["rows"]
    page = (ROOT / "docs/eight_bits.md").read_text()
    assert all(table in page for table in tables(kept))


def test_of_outliers_the_error_is_what_the_paper_had() -> None:
    rows = json.loads((ROOT / "benchmarks/results/eight-bits/cpu.json").read_text())["rows"]
    found = {row["impl"]: row["rmse"] for row in rows if row["row"] == "D128 8192 keys outliers"}
    for way in ("per head, Hadamard, centered", "per head, Hadamard, centered, and P"):
        assert found[way] < min(1.05e-2, 0.5 * found["per head"])


def test_of_many_draws_the_error_is_the_papers_within_chance() -> None:
    rows = json.loads((ROOT / "benchmarks/results/eight-bits/cpu-outliers.json").read_text())["rows"]
    found = {row["impl"]: (row["rmse"], row["standard_error"]) for row in rows}
    page = (ROOT / "docs/eight_bits.md").read_text()
    for way, (error, chance) in found.items():
        assert way == "size" or f"| {error:.1e} | {chance:.1e} |" in page
    error, chance = found["per head, Hadamard, centered"]
    assert error - 2 * chance <= 9.1e-3
    assert found["per row, Hadamard, centered, best of 4"][0] <= 9.1e-3


def test_scales_that_products_do_not_take_are_refused_where_values_are_seen() -> None:
    q, (k, v) = torch.randn(1, 2, 8, 16), (torch.randn(1, 2, 8, 16).to(torch.float8_e4m3fn) for _ in range(2))
    with pytest.raises(errors.InvalidScale, match=r"k_scale has -1"):
        ca.attention(q, k, v, k_scale=-1.0)
    negative, large = -torch.ones(1, 2), torch.full((1, 2, 8, 1), 200.0)
    ca.attention(q, k, v, v_scale=negative)
    with ca.debug_checks():
        with pytest.raises(errors.InvalidScale, match=r"v_scale has -1"):
            ca.attention(q, k, v, v_scale=negative)
        with pytest.raises(errors.InvalidScale, match=r"v_scale has 200 for a key"):
            ca.attention(q.half(), k, v, v_scale=large)
        ca.attention(q.bfloat16(), k, v, v_scale=large)
