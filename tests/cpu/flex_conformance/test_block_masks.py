"""torch's BlockMask: masks of every kind, block sizes, lists that a user made, slices, rows that see nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    _create_empty_block_mask,
    and_masks,
    create_block_mask,
    or_masks,
)

import composattn as ca
from tests.cpu.flex_conformance.catalogue import MASKS, anticausal, causal, first_rows, window
from tests.cpu.flex_conformance.truth import Mod, Mods, attention, blocks_of, check, draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_every_kind(mask: Mod, dtype: torch.dtype, generator: torch.Generator) -> None:
    check(Mods.of(None, mask), *draw(generator, dtype=dtype), generator)


@pytest.mark.parametrize("size", [16, 32, 96, 128, 256, (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("length", [63, 64, 96])
def test_lengths_that_blocks_divide_or_not(size: Any, length: int, generator: torch.Generator) -> None:
    q, k, v = draw(generator, q_len=length)
    check(Mods.of(None, causal), q, k, v, generator, block_mask=blocks_of(causal, q, k, size))


@pytest.mark.parametrize(("batch", "heads"), [(None, None), (2, None), (None, 4), (1, 1)])
def test_lists_that_batches_and_heads_share(batch: Any, heads: Any, generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    made = create_block_mask(window, batch, heads, 48, 48, "cpu", 16)
    check(Mods.of(None, window), q, k, v, generator, block_mask=made)


@pytest.mark.parametrize(
    "mask",
    [
        and_masks(causal, window),
        or_masks(window, first_rows),
        and_masks(causal, anticausal),
        or_masks(causal, anticausal),
    ],
    ids=["both", "either", "the diagonal", "all"],
)
def test_masks_that_torch_joined(mask: Mod, generator: torch.Generator) -> None:
    check(Mods.of(None, mask), *draw(generator), generator)


@pytest.mark.parametrize("by_queries", [False, True])
def test_lists_that_a_user_made(by_queries: bool, generator: torch.Generator) -> None:
    """The lists of keys say all there is to say; those of queries are for torch's backward."""
    q, k, v = draw(generator, q_len=64)
    counts, rows = torch.arange(1, 5, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    made = BlockMask.from_kv_blocks(
        counts[None, None], rows.expand(4, 4)[None, None], BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(64, 64),
        compute_q_blocks=by_queries,
    )  # fmt: skip
    check(Mods.of(None, causal), q, k, v, generator, block_mask=made)


def test_full_blocks_are_seen_whole(generator: torch.Generator) -> None:
    """Whatever the mask says there."""
    counts, at = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    made = BlockMask.from_kv_blocks(
        counts, at, counts, at.flip(-1), BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(32, 32)
    )

    def meaning(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // 16 != kv // 16) | (q >= kv)

    check(Mods.of(None, meaning), *draw(generator, q_len=32), generator, block_mask=made)


def test_a_slice_of_a_mask_with_a_new_function(generator: torch.Generator) -> None:
    """Generation does so: one query block of a causal mask, its position added by hand."""
    whole = create_block_mask(causal, 1, 1, 64, 64, "cpu", 16)
    for position in (0, 17, 63):
        part = whole[:, :, position // 16]
        part.mask_mod = lambda b, h, q, kv, at=position: q + at >= kv
        part.seq_lengths = (1, 64)
        mods = Mods.of(None, part.mask_mod)
        check(mods, *draw(generator, q_len=1, kv_len=64), generator, block_mask=part)


def test_a_mask_that_went_through_a_pytree(generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    made = blocks_of(window, q, k)
    leaves, spec = torch.utils._pytree.tree_flatten(made)
    check(Mods.of(None, window), q, k, v, generator, block_mask=torch.utils._pytree.tree_unflatten(leaves, spec))


def test_a_mask_without_lists_of_queries(generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    made = blocks_of(causal, q, k)
    made.q_num_blocks = made.q_indices = made.full_q_num_blocks = made.full_q_indices = None
    check(Mods.of(None, causal), q, k, v, generator, block_mask=made)


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(generator: torch.Generator) -> None:
    q, k, v = (t.requires_grad_() for t in draw(generator))
    out, lse = ca.flex_attention(q, k, v, block_mask=blocks_of(first_rows, q, k), return_lse=True)
    assert bool((out[:, :, 20:] == 0).all())
    assert bool((lse[:, :, 20:] == -torch.inf).all())
    (dq,) = torch.autograd.grad(out.sum() + lse.sum(), q)
    assert bool((dq[:, :, 20:] == 0).all())
    assert not bool(dq.isnan().any())


def test_keys_that_are_hidden_may_be_no_numbers(generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    exact = attention(*(t.double() for t in (q, k, v)), None, lambda b, h, q, kv: (kv < 30) & (q >= 0))[0]
    k[:, :, 30:] = torch.nan
    made = create_block_mask(lambda b, h, q, kv: kv < 30, None, None, 48, 48, "cpu", 16)
    found = ca.flex_attention(q, k, v, block_mask=made)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_causal_by_score_by_mask_and_by_sdpa_agree(generator: torch.Generator) -> None:
    q, k, v = draw(generator)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    by_score = ca.flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf))
    by_mask = ca.flex_attention(q, k, v, block_mask=blocks_of(causal, q, k))
    for found in (by_score, by_mask):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_mask_for_no_mask_fits_all_lengths(compiled: bool, generator: torch.Generator) -> None:
    """torch puts it in place of None: one block, for lengths of (1, 1)."""
    q, k, v = draw(generator, 2, 2, 40, 72)
    none = _create_empty_block_mask(q, k)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return ca.flex_attention(q, k, v, block_mask=none)

    found = (torch.compile(call, backend="eager", fullgraph=True) if compiled else call)(q, k, v)
    assert torch.equal(found, ca.flex_attention(q, k, v))


@pytest.mark.parametrize("block", [(1, 64), (3, 32), (16, 40)])
def test_a_block_of_any_size_that_has_the_whole_length(block: Any, generator: torch.Generator) -> None:
    """All queries lie in one block, as in decoding."""
    q, k, v = draw(generator, 2, 2, block[0], 40 if block[1] == 40 else 96)
    made = create_block_mask(lambda b, h, i, j: j % 5 != i, 1, 1, q.shape[2], k.shape[2], "cpu", block)
    found = ca.flex_attention(q, k, v, block_mask=made)
    wanted = attention(*(t.double() for t in (q, k, v)), None, lambda b, h, i, j: j % 5 != i)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
