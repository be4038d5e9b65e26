"""What other implementations compute wrongly without a word, as cases that every backend here must get right.

Known of them: causal dropped where a mask is given too, or that mask ignored in the backward; query heads mistaken
where heads share keys; a tensor that is read twice left with half of its gradient; positions of packed sequences
counted from the first of all; strides of dO taken for contiguous;
block lists trusted to be ascending, or their transposed twin to be given; tiles called full or empty by five sampled
points; mods told apart by their source text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import composattn as ca
from composattn.mods import causal, sliding_window
from composattn.testing import Case, check, make_case, make_varlen_case
from tests.support import as_served, needs_backward

Mod = Callable[..., Any]

MASKS: dict[str, Mod] = {
    "causal-and-another-mask": causal() & ca.mask(lambda b, h, q, kv: (q + kv) % 3 != 1),
    "window-and-another-mask": causal() & sliding_window(40) & ca.mask(lambda b, h, q, kv: kv % 5 != 2),
    "another-limit-for-each-head": lambda b, h, q, kv: q >= kv + 7 * h,
    # corners and middle of a tile of 64 or 128 say nothing of these
    "holes-in-every-tile": lambda b, h, q, kv: kv % 32 != 21,
    "one-key-of-every-tile": lambda b, h, q, kv: (kv % 32 == 21) | (q == kv),
}

# score mods of a table (H, S)
SCORES: dict[str, Callable[[torch.Tensor], Mod]] = {
    "head-and-distance": lambda table: lambda s, b, h, q, kv: s - table[h, 0] * (q - kv),
    "a-tensor-read-twice": lambda table: lambda s, b, h, q, kv: s * table[h, q] + 0.5 * table[h, kv],
    # of neighbouring keys far apart: several values a load would be wrong
    "keys-out-of-order": lambda table: lambda s, b, h, q, kv: s + table[h, (7 * kv + 3 * q) % table.shape[1]],
}

DOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sequence-first": lambda dout: dout.transpose(1, 2).contiguous().transpose(1, 2),
    "a-slice-of-more": lambda dout: torch.cat([dout, torch.full_like(dout, torch.nan)], -1)[..., : dout.shape[-1]],
    "expanded": lambda dout: dout[:1, :1, :1, :1].expand(dout.shape),
}


def up_to(last: int) -> Mod:
    return lambda b, h, q, kv: kv <= last


reach = 0


def within_reach(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= reach


class Suite:
    """A subclass names the backend and the sizes of a call."""

    backend: ClassVar[str]
    heads: ClassVar[tuple[int, int]] = (4, 2)  # of queries, of keys
    length: ClassVar[int] = 150
    dim: ClassVar[int] = 32
    dtype: ClassVar[torch.dtype] = torch.float32
    device: ClassVar[str] = "cpu"

    def attention(self) -> Callable[..., Any]:
        return functools.partial(ca.attention, backend=self.backend)

    def case(self, generator: torch.Generator, mask_mod: Mod, score_mod: Mod | None = None) -> Case:
        heads, kv_heads = self.heads
        seed = int(torch.randint(2**31, (), generator=generator))
        made = make_case(
            seed, score_mod=score_mod, mask_mod=mask_mod, batch=1, heads=heads, kv_heads=kv_heads, q_len=self.length,
            dim=self.dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip
        return as_served(made, self.backend)

    @pytest.mark.parametrize("mask", MASKS)
    def test_masks(self, mask: str, generator: torch.Generator) -> None:
        check(self.attention(), self.case(generator, MASKS[mask]))

    @pytest.mark.parametrize("score", SCORES)
    def test_scores_where_heads_share_keys(self, score: str, generator: torch.Generator) -> None:
        table = 0.3 * torch.randn(self.heads[0], self.length, generator=generator)
        made = SCORES[score](table.to(self.device).requires_grad_())
        check(self.attention(), self.case(generator, causal(), made))

    @pytest.mark.parametrize("score", SCORES)
    def test_scores_on_ragged_lengths(self, score: str, generator: torch.Generator) -> None:
        q_lens, kv_lens = [self.length // 3, 0, self.length], [self.length // 2, 11, self.length - 37]
        table = 0.3 * torch.randn(self.heads[0], self.length, generator=generator)
        case = make_varlen_case(
            int(torch.randint(2**31, (), generator=generator)), q_lens, kv_lens,
            used_q=[n - n // 7 for n in q_lens], used_kv=[n - n // 5 for n in kv_lens],
            score_mod=SCORES[score](table.to(self.device).requires_grad_()), mask_mod=causal(), heads=self.heads[0],
            kv_heads=self.heads[1], dim=self.dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip
        check(self.attention(), as_served(case, self.backend))

    @pytest.mark.parametrize("form", DOUTS)
    def test_strides_of_the_incoming_gradient(self, form: str, generator: torch.Generator) -> None:
        needs_backward(self.backend)
        case = self.case(generator, causal())
        assert case.dout is not None
        check(self.attention(), dataclasses.replace(case, dout=DOUTS[form](case.dout)))

    def test_lists_of_blocks_in_any_order_and_without_their_transposed(self, generator: torch.Generator) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        size, blocks = 32, -(-self.length // 32)
        shown = torch.rand(blocks, blocks, generator=generator) < 0.5
        order = torch.rand(blocks, blocks, generator=generator).masked_fill(~shown, 2.0).argsort(dim=1)
        counts, order = (t[None, None].to(self.device, torch.int32) for t in (shown.sum(1), order))
        block_mask = BlockMask.from_kv_blocks(
            counts, order, BLOCK_SIZE=size, mask_mod=causal(), seq_lengths=(self.length, self.length)
        )
        table = shown.to(self.device)

        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            del options["mask_mod"]  # what the lists mean
            return ca.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, backend=self.backend, **options)

        means = self.case(generator, lambda b, h, q, kv: (q >= kv) & table[q // size, kv // size])
        check(attention, means)

    def test_functions_of_the_same_text_are_told_apart(
        self, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for last in (20, 90):
            check(self.attention(), self.case(generator, up_to(last)))
        for width in (5, 50):
            monkeypatch.setitem(globals(), "reach", width)
            check(self.attention(), self.case(generator, within_reach))
