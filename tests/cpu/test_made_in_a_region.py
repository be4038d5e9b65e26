"""Ready mods, and what joins them, made inside of a compiled region: each is the mod that eager code makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import mods
from composattn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from composattn.mods import alibi, causal, document, relative_bias, sliding_window, softcap
from composattn.mods.mod import Mod

B, H, Q, KV = 2, 4, 24, 30
NUMBER, REAL = ca.scalar(5), ca.scalar(2.5)
IDS = (torch.arange(40) // 7).repeat(B, 1)
SLOPES, TABLE = torch.rand(H), torch.randn(H, 9)
OFFSETS = torch.tensor([0, 10, 24, 30])
BLOCKS = torch.ones(1, 1, 2, 2, dtype=torch.bool)
PICKED = torch.tensor([[[[0, -1], [1, 0]]]])


def asked(mask: ca.Mask) -> ca.Mask:
    """`mask`, made of a function that calls it."""
    return ca.mask(lambda b, h, q, kv: mask(b, h, q, kv))


MASKS: dict[str, list[Callable[[], Any]]] = {
    "causal": [causal, lambda: causal("bottom_right")],
    "sliding_window": [
        lambda: sliding_window(4),
        lambda: sliding_window((4, 2), align="bottom_right"),
        lambda: sliding_window((NUMBER, None)),
        lambda: sliding_window(torch.tensor([1, 2, 3, 4]), "bottom_right"),
    ],
    "prefix_lm": [lambda: mods.prefix_lm(3), lambda: mods.prefix_lm(torch.tensor([3, 7]))],
    "document": [lambda: document(IDS), lambda: document(IDS[0], IDS[1])],
    "block_diagonal": [lambda: mods.block_diagonal(5, 7)],
    "chunked": [lambda: mods.chunked(5, 1), lambda: mods.chunked(5, None)],
    "dilated_window": [lambda: mods.dilated_window((9, 9), 3)],
    "global_tokens": [lambda: mods.global_tokens(2), lambda: mods.global_tokens(IDS % 2 == 0, "queries")],
    "padding": [lambda: mods.padding(torch.tensor([20, 30]), torch.tensor([10, 24])), lambda: mods.padding(IDS > 0)],
    "neighborhood": [lambda: mods.neighborhood((6, 5), 2, 2), lambda: mods.neighborhood((6, 5), 3, 1, (True, False))],
    "joined": [
        lambda: ~causal(),
        lambda: causal() | (lambda b, h, q, kv: kv < 3),
        lambda: (lambda b, h, q, kv: kv < 13) & causal("bottom_right"),
        lambda: ca.mask(lambda b, h, q, kv: q >= kv).named("mine"),
        lambda: ca.BlockSparse(BLOCKS, 16) & causal(),
        lambda: asked(ca.BlockSparse(BLOCKS, 16)),
        lambda: asked(ca.BlockSparse.topk(PICKED, 16, Q, KV) & causal()),
    ],
    "shifted": [
        lambda: causal().shifted(q=5),
        lambda: causal("bottom_right").shifted(q=-2),
        lambda: (causal() & document(IDS)).shifted(q=torch.tensor(3), kv=NUMBER),
        lambda: (causal() & document(IDS.repeat(2, 1))).shifted(b=2),
        lambda: document(IDS.repeat(2, 1)).shifted(b=0),
        lambda: ca.BlockSparse(BLOCKS, 16).shifted(q=0),
    ],
}  # fmt: skip
SCORES: dict[str, list[Callable[[], Any]]] = {
    "alibi": [
        lambda: alibi(H),
        lambda: alibi(SLOPES, True, "bottom_right"),
        lambda: alibi(SLOPES.expand(B, H)),
        lambda: alibi(6).shifted(h=2),
        lambda: alibi(6).shifted(h=0),
    ],
    "softcap": [lambda: softcap(3.0), lambda: softcap(REAL), lambda: softcap(torch.tensor(2.0))],
    "relative_bias": [lambda: relative_bias(TABLE), lambda: relative_bias(SLOPES, False)],
    "t5_bucket_bias": [lambda: mods.t5_bucket_bias(TABLE.T[:8], 20)],
    "bias": [lambda: mods.bias(TABLE[:1, :1].expand(1, H, Q, KV))],
    "scale_by_head": [lambda: mods.scale_by_head(SLOPES)],
    "temperature": [lambda: mods.temperature(2.0), lambda: mods.temperature(torch.tensor(2.0))],
    "joined": [
        lambda: alibi(SLOPES) >> softcap(2.0),
        lambda: alibi(SLOPES) + relative_bias(TABLE),
        lambda: (lambda score, b, h, q, kv: score * 2) >> softcap(2.0),
        lambda: ca.score(lambda score, b, h, q, kv: score * 2),
        lambda: (alibi(SLOPES.repeat(2)) >> softcap(3.0)).shifted(h=4, q=6),
    ],
}
SHIFTED_BY = {"q=0.5": 0.5, "q=True": True, "q=a torch.float32 tensor": torch.tensor(0.5)}
READ_WHEN_MADE: dict[str, Callable[[], Any]] = {
    "offsets": lambda: document(offsets=OFFSETS),
    "tokens": lambda: mods.global_tokens(torch.tensor([1, 5])),
    "offsets of a prefix": lambda: mods.shared_prefix(OFFSETS),
}


def compiled(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="eager", fullgraph=True, **options)


def made_in_a_region(makers: list[Callable[[], Any]]) -> list[tuple[str, Any]]:
    """What mods made there compute: forms, and leaves."""
    return compiled(lambda: [(mod.form, mod.leaves) for mod in [make() for make in makers]])()  # type: ignore[no-any-return]


def attended(**options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, length, 8, generator=generator) for length in (Q, KV, KV))
    return ca.attention(q, k, v, **options)


@pytest.mark.parametrize(("kind", "gallery"), [(ca.Mask, MASKS), (ca.Score, SCORES)])
def test_a_mod_made_in_a_region_is_the_one_of_eager_code(kind: type[Mod], gallery: dict[str, Any]) -> None:
    makers = [make for of_name in gallery.values() for make in of_name]
    option = "mask_mod" if kind is ca.Mask else "score_mod"
    for make, (form, leaves) in zip(makers, made_in_a_region(makers), strict=True):
        eager = attended(**{option: make()})
        torch.testing.assert_close(attended(**{option: kind.formed(form, leaves, "of a region")}), eager)


def test_every_ready_mod_is_made_in_a_region() -> None:
    made = {*MASKS, *SCORES, "shared_prefix"}
    assert made >= set(mods.__all__)


@pytest.mark.parametrize("name", READ_WHEN_MADE)
def test_what_is_read_when_a_mask_is_made_is_refused_in_one_graph(name: str) -> None:
    make = READ_WHEN_MADE[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedTransform.*make the mask before"):
        compiled(lambda: make().form)()


@pytest.mark.slow  # Dynamo looks at each function behind the break
def test_what_is_read_when_a_mask_is_made_breaks_the_graph_elsewhere() -> None:
    torch._dynamo.reset()
    make = READ_WHEN_MADE["tokens"]
    broken = torch.compile(lambda: attended(mask_mod=make()), backend="eager")
    torch.testing.assert_close(broken(), attended(mask_mod=make()))


@pytest.mark.parametrize("words", SHIFTED_BY)
def test_a_shift_by_no_integer_is_refused_with_the_words_of_eager_code(words: str) -> None:
    by = SHIFTED_BY[words]
    with pytest.raises(ca.errors.InvalidModArgument, match=words):
        causal().shifted(q=by)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"shifted by integers, got {words}"):
        compiled(lambda: causal().shifted(q=by).form)()


def test_a_shift_by_a_length_that_changes_is_compiled_once() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    q = torch.randn(1, 1, 1, 8)
    step = torch.compile(
        lambda k, past: ca.attention(q, k, k, mask_mod=causal().shifted(q=past)),
        backend=counter, fullgraph=True, dynamic=True,
    )  # fmt: skip
    for past in (4, 5, 9):
        k = torch.randn(1, 1, 12, 8)
        torch.testing.assert_close(step(k, past), ca.attention(q, k[:, :, : past + 1], k[:, :, : past + 1]))
    assert counter.frame_count == 1


def test_flash_attn_with_windows_and_slopes_is_one_graph() -> None:
    q, k, slopes = torch.randn(2, 12, H, 8), torch.randn(2, 15, H, 8), torch.rand(H)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)

    def both(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor) -> Any:
        dense = flash_attn_func(q, k, k, causal=True, window_size=(4, 0), alibi_slopes=slopes, softcap=3.0)
        packed = flash_attn_varlen_func(
            q[0], k[0, :12], k[0, :12], cu, cu, 7, 7, window_size=(4, 1), alibi_slopes=slopes
        )
        return dense, packed

    torch.testing.assert_close(compiled(both)(q, k, slopes), both(q, k, slopes))


def test_weights_of_rows_are_refused_in_one_graph() -> None:
    q, k = torch.randn(B, H, Q, 8), torch.randn(B, H, KV, 8)
    compiled = torch.compile(lambda q, k: ca.attention_weights(q, k, rows=[0, 7]), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"UnsupportedTransform.*looks at rows"):
        compiled(q, k)
