"""Parts of a call by hand: weights of chosen rows, mods of shifted positions, keys behind those in pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import alibi, causal, document, sliding_window, softcap
from tests.support import qkv

ROWS = [0, 5, 19]


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


# --- weights of chosen rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 0.0, 2.0])])
def test_weights_of_rows_times_values_are_the_output(sinks: torch.Tensor | None, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, heads=4, kv_heads=2, q_len=20, kv_len=30)
    options: Any = {"mask_mod": seen, "score_mod": alibi(4) >> softcap(3.0), "sinks": sinks}
    weights = ca.attention_weights(q, k, ROWS, **options)
    assert weights.shape == (q.shape[0], 4, 3, 30) and weights.dtype is torch.float32
    out, lse = ca.attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out[:, :, ROWS], rtol=1e-5, atol=1e-5)
    rest = torch.zeros(4) if sinks is None else sinks.exp()
    share = 1 - rest[:, None] / lse[:, :, ROWS].exp()
    wanted = torch.where(lse[:, :, ROWS] == -torch.inf, 0.0, share)
    torch.testing.assert_close(weights.sum(-1), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[20], [-1], torch.tensor([0.5]), torch.tensor([[1]]), "x", None, [[1], 2]])
def test_rows_that_are_none_are_refused_by_name(rows: Any, generator: torch.Generator) -> None:
    q, k, _ = qkv(generator=generator, q_len=20)
    with pytest.raises(errors.InvalidArgument, match="rows"):
        ca.attention_weights(q, k, rows)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_rows_are_integers_of_any_type(dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, _ = qkv(generator=generator, q_len=20)
    assert torch.equal(
        ca.attention_weights(q, k, torch.tensor([3, 0], dtype=dtype)), ca.attention_weights(q, k, [3, 0])
    )


# --- mods of shifted positions --------------------------------------------------------------------------------------


def as_numbers(value: int, kind: str) -> Any:
    return {"an int": value, "a scalar": ca.scalar(value), "a tensor": torch.tensor(value)}[kind]


@pytest.mark.parametrize("kind", ["an int", "a scalar", "a tensor"])
def test_parts_of_queries_and_heads_are_those_of_the_whole(kind: str, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, heads=4, kv_heads=4, q_len=40, kv_len=40)
    mask, score = causal() & sliding_window(13), alibi(torch.tensor([0.5, 0.25, 0.1, 0.05]))
    whole = ca.attention(q, k, v, mask_mod=mask, score_mod=score)
    heads, rows = slice(2, 4), slice(24, 40)
    by = {"h": as_numbers(2, kind), "q": as_numbers(24, kind)}
    part = ca.attention(
        q[:, heads, rows], k[:, heads], v[:, heads], mask_mod=mask.shifted(**by), score_mod=score.shifted(**by)
    )
    torch.testing.assert_close(part, whole[:, heads, rows])


def test_parts_of_keys_join_by_their_lse(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, q_len=40, kv_len=40)
    mask = document(torch.arange(40) // 9) & causal()
    out, lse = ca.attention(q, k, v, mask_mod=mask, return_lse=True)
    parts = []
    for first in (0, 16):
        keys = slice(first, 16 if first == 0 else 40)
        parts.append(ca.attention(q, k[:, :, keys], v[:, :, keys], mask_mod=mask.shifted(kv=first), return_lse=True))
    total = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(total, lse)
    torch.testing.assert_close(sum(o * (s - total).exp()[..., None] for o, s in parts), out)


def test_a_shift_by_no_integer_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidModArgument, match=r"q=0\.5"):
        causal().shifted(q=0.5)


# --- keys behind those in pages ---------------------------------------------------------------------------------------

PAGE, HEADS = 16, 2


def cache(generator: torch.Generator, width: int) -> torch.Tensor:
    return torch.randn(9, PAGE, HEADS, width, generator=generator).transpose(1, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_appended_keys_are_read_where_they_belong(packed: bool, generator: torch.Generator) -> None:
    table = torch.randperm(9, generator=generator).to(torch.int32).view(3, 3)
    paged = ca.Paged(table, PAGE, torch.tensor([0, 15, 16], dtype=torch.int32))
    k_cache, v_cache = cache(generator, 8), cache(generator, 4)
    history = [[(c.transpose(1, 2)[table[b].long()].flatten(0, 1)[:n]) for b, n in enumerate((0, 15, 16))]
               for c in (k_cache, v_cache)]  # fmt: skip
    for count in (3, 1, 20):
        new = [torch.randn(3, HEADS, count, w, generator=generator) for w in (8, 4)]
        if packed:
            flat = [t.transpose(1, 2).flatten(0, 1) for t in new]
            begins = torch.arange(4, dtype=torch.int32) * count
            paged = paged.append(k_cache, v_cache, *flat, varlen=ca.Varlen(begins))
        else:
            paged = paged.append(k_cache, v_cache, *new)
        history = [[torch.cat((h, t[b].transpose(0, 1))) for b, h in enumerate(one)]
                   for one, t in zip(history, new, strict=True)]  # fmt: skip
    assert paged.seqused.tolist() == [24, 39, 40] and paged.seqused.dtype is torch.int32
    q = torch.randn(3, HEADS, 2, 8, generator=generator)
    out = ca.attention(q, k_cache, v_cache, paged=paged)
    for b, (k, v) in enumerate(zip(*history, strict=True)):
        wanted = ca.attention(q[b : b + 1], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        torch.testing.assert_close(out[b : b + 1], wanted)


def test_what_fits_no_page_is_refused(generator: torch.Generator) -> None:
    table = torch.arange(3, dtype=torch.int32)[:, None]
    paged = ca.Paged(table, PAGE, torch.tensor([0, 3, 16], dtype=torch.int32))
    k_cache, new = cache(generator, 8), torch.randn(3, HEADS, 1, 8, generator=generator)
    with pytest.raises(errors.UsedOutOfRange, match="seqused is 17 for sequence 2, which has room for 16"):
        paged.append(k_cache, k_cache.clone(), new, new)
    for wrong in (new[:2], new[:, :1], new[..., :4], new[0]):
        with pytest.raises(errors.ShapeMismatch):
            paged.append(k_cache, k_cache.clone(), wrong, wrong)
    with pytest.raises(errors.ShapeMismatch, match="each key needs its value"):
        paged.append(k_cache, k_cache.clone(), new, new[:, :, :0])
    with pytest.raises(errors.DeviceMismatch, match="k is on meta, page_table on cpu"):
        paged.append(k_cache, k_cache.clone(), new.to("meta"), new)
    with pytest.raises(errors.NotATensor, match="k_cache is a list"):
        paged.append([k_cache], k_cache.clone(), new, new)  # type: ignore[arg-type]
    for other in (torch.arange(4), ca.Varlen(torch.arange(3, dtype=torch.int32))):
        with pytest.raises(errors.SequencesMismatch, match=r"pass ca.Varlen\(cu_seqlens\) of 3 sequences"):
            paged.append(k_cache, k_cache.clone(), new[:, :, 0], new[:, :, 0], varlen=other)  # type: ignore[arg-type]
    used = ca.Varlen(torch.tensor([0, 1, 2, 3], dtype=torch.int32), seqused_q=torch.ones(3, dtype=torch.int32))
    with pytest.raises(errors.UnsupportedOption, match="seqused_q"):
        paged.append(k_cache, k_cache.clone(), new[:, :, 0], new[:, :, 0], varlen=used)


def test_a_cache_that_can_not_keep_rows_as_they_are_is_refused(generator: torch.Generator) -> None:
    paged = ca.Paged(torch.arange(2, dtype=torch.int32)[:, None], PAGE, torch.tensor([0, 3], dtype=torch.int32))
    own, new = torch.zeros(2, HEADS, PAGE, 8), torch.randn(2, HEADS, 1, 8, generator=generator)
    turned = ca.Quantized(own.to(torch.float8_e4m3fn), torch.ones(HEADS), rotated=True)
    refused: list[tuple[type[Exception], Any, torch.Tensor]] = [
        (errors.UnsupportedLayout, own[:1].expand(2, -1, -1, -1), new),
        (errors.UnsupportedLayout, ca.Quantized(turned.data, torch.ones(1).expand(2, HEADS, PAGE)), new),
        (errors.UnsupportedDType, own.to(torch.int8), new),
        (errors.UnsupportedDType, own, new.long()),
        (errors.UnsupportedDType, own, new + 0j),
        (errors.GradientUnsupported, own.clone().requires_grad_(), new),
        (errors.UnsupportedOption, turned, new),
    ]
    for error, cache, rows in refused:
        for caches in ((cache, own), (own, cache)):
            with pytest.raises(error, match=r"\b[kv](_cache)?\b"):
                paged.append(*caches, rows, rows)
    assert not own.any() and not turned.data.float().any()
    with torch.no_grad():
        paged.append(own.clone().requires_grad_(), own.clone(), new, new)
    paged.append(turned._replace(rotated=False), own, new, new)
    assert turned.data.float().any()


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


NO_ROOM = {
    # behind 3 and 17 rows of two sequences with two pages each: a table, rows in use, first rows of three new ones
    "a-page-below-0": (errors.PageOutOfRange, [[0, 1], [2, -1]], (3, 17), (0, 1, 3)),
    "a-page-beyond-the-cache": (errors.PageOutOfRange, [[0, 1], [2, 9]], (3, 17), (0, 1, 3)),
    "rows-below-0": (errors.UsedOutOfRange, [[0, 1], [2, 3]], (3, -1), (0, 1, 3)),
    "no-row-left": (errors.UsedOutOfRange, [[0, 1], [2, 3]], (3, 31), (0, 1, 3)),
    "fewer-new-rows-than-said": (errors.OffsetsOutOfRange, [[0, 1], [2, 3]], (3, 17), (0, 1, 9)),
    "more-new-rows-than-said": (errors.OffsetsOutOfRange, [[0, 1], [2, 3]], (3, 17), (0, 1, 2)),
    "offsets-that-fall": (errors.OffsetsNotMonotone, [[0, 1], [2, 3]], (3, 17), (0, 4, 3)),
}


@pytest.mark.parametrize("why", NO_ROOM)
def test_rows_that_have_no_page_are_refused_before_any_is_written(why: str) -> None:
    error, table, used, begins = NO_ROOM[why]
    paged = ca.Paged(torch.tensor(table, dtype=torch.int32), PAGE, int32(*used))
    k_cache, new = torch.zeros(5, HEADS, PAGE, 8), torch.ones(3, HEADS, 8)
    with pytest.raises(error):
        paged.append(k_cache, k_cache, new, new, varlen=ca.Varlen(int32(*begins)))
    assert not k_cache.any()


@pytest.mark.parametrize("why", ["a-page-below-0", "a-page-beyond-the-cache", "rows-below-0"])
def test_compiled_code_writes_no_row_into_a_page_that_is_none(why: str) -> None:
    _, table, used, _ = NO_ROOM[why]
    k_cache, new = torch.zeros(5, HEADS, PAGE, 8), torch.ones(2, HEADS, 1, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def append(table: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return ca.Paged(table, PAGE, used).append(k_cache, k_cache, new, new).seqused

    with pytest.raises(IndexError, match="out of bounds"):
        append(torch.tensor(table, dtype=torch.int32), int32(*used))
    assert not k_cache[4].any()
    assert append(torch.tensor([[0, -1], [2, 3]], dtype=torch.int32), int32(3, 17)).tolist() == [4, 18]
    assert k_cache.any(-1).any(1).nonzero().tolist() == [[0, 3], [3, 1]]
