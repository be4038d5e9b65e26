"""BlockSparse against the dense mask, however the blocks are given; composed, differentiated, refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import composattn as ca
from composattn import errors
from composattn.mods import causal, masks, scores
from tests.support import qkv


def expanded(kinds: torch.Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> torch.Tensor:
    """A map of blocks as one of positions."""
    return kinds.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, :q_len, :kv_len]


@st.composite
def block_maps(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, int], int, int]:
    """(kinds, block, q_len, kv_len)."""
    block = (16 * draw(st.integers(1, 3)), 16 * draw(st.integers(1, 3)))
    q_len, kv_len = draw(st.integers(1, 120)), draw(st.integers(1, 120))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), -(-q_len // block[0]), -(-kv_len // block[1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(0, 3, shape, generator=generator, dtype=torch.int8), block, q_len, kv_len


def csr(kinds: torch.Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> ca.BlockSparse:
    """CSR of one head's map, entries shuffled within a row, twice each, with unused ones behind."""
    rows = [torch.cat([row.nonzero().flatten()] * 2) for row in kinds[0, 0]]
    indices = torch.cat([*(r[torch.randperm(len(r))] for r in rows), torch.zeros(3, dtype=torch.int64)])
    return ca.BlockSparse.from_csr(
        torch.tensor([0, *(len(r) for r in rows)]).cumsum(0).int(), indices.int(), block, q_len, kv_len
    )


def coo(kinds: torch.Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> ca.BlockSparse:
    pairs = kinds[0, 0].nonzero()
    pairs = torch.cat([pairs, torch.tensor([[-1, 0], [0, -1]]), pairs])[torch.randperm(2 * len(pairs) + 2)]
    return ca.BlockSparse.from_coo(pairs[:, 0], pairs[:, 1], block, q_len, kv_len)


def topk(kinds: torch.Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> ca.BlockSparse:
    columns = torch.arange(kinds.shape[3]).expand_as(kinds)
    picked = torch.where(kinds > 0, columns, -1)
    return ca.BlockSparse.topk(torch.cat([picked, picked.flip(-1)], -1), block, q_len, kv_len)


def tile_map(kinds: torch.Tensor, block: tuple[int, int], q_len: int, kv_len: int) -> ca.BlockSparse:
    return ca.BlockSparse(kinds, block)


Make = Callable[[torch.Tensor, tuple[int, int], int, int], ca.BlockSparse]


@settings(deadline=None, max_examples=40)
@given(block_maps())
@pytest.mark.parametrize("make", [tile_map, topk, csr, coo], ids=lambda make: make.__name__)
def test_blocks_are_what_they_name(make: Make, drawn: tuple[torch.Tensor, tuple[int, int], int, int]) -> None:
    kinds, block, q_len, kv_len = drawn
    if make in (csr, coo):
        kinds = kinds[:1, :1]
    mask = make(kinds, block, q_len, kv_len)
    batch, heads = kinds.shape[:2]
    assert torch.equal(mask.dense(q_len, kv_len, batch, heads), expanded(kinds > 0, block, q_len, kv_len))


@settings(deadline=None, max_examples=40)
@given(block_maps())
def test_blocks_of_kind_1_are_what_the_partial_mask_says(
    drawn: tuple[torch.Tensor, tuple[int, int], int, int],
) -> None:
    kinds, block, q_len, kv_len = drawn
    mask = ca.BlockSparse(kinds, block, partial=causal())
    wide = expanded(kinds, block, q_len, kv_len)
    seen = (wide == 2) | ((wide == 1) & causal().dense(q_len, kv_len))
    assert torch.equal(mask.dense(q_len, kv_len, *kinds.shape[:2]), seen)


@pytest.mark.parametrize("block", [16, (32, 48)])
def test_the_tiles_of_a_mask_with_the_mask_are_the_mask(block: int | tuple[int, int]) -> None:
    mask = masks.neighborhood((10, 20), (3, 5))
    tile = (block, block) if isinstance(block, int) else block
    again = ca.BlockSparse(mask.tiles(200, 200, tile), block, partial=mask)
    assert torch.equal(again.dense(200, 200), mask.dense(200, 200))


def test_a_head_and_batch_of_its_own_for_each_csr_row() -> None:
    indptr = torch.tensor([[[0, 1, 2]], [[0, 2, 2]]])
    indices = torch.tensor([[[1, 0], [0, 0]]])
    found = ca.BlockSparse.from_csr(indptr, indices, 16, 32, 32).table.tensor[:, :, :2, :2]
    expected = torch.tensor([[[[0, 1], [1, 0]], [[1, 0], [1, 0]]], [[[1, 1], [0, 0]], [[1, 0], [0, 0]]]]).bool()
    assert torch.equal(found, expected)


@settings(deadline=None, max_examples=15)
@given(block_maps())
@pytest.mark.parametrize("composed", ["alone", "and-window", "or-diagonal", "not"])
def test_attends_and_differentiates_as_the_dense_mask(
    composed: str, drawn: tuple[torch.Tensor, tuple[int, int], int, int]
) -> None:
    kinds, block, q_len, kv_len = drawn
    blocks = ca.BlockSparse(kinds, block)
    mask = {
        "alone": blocks, "and-window": blocks & masks.sliding_window((20, 30)),
        "or-diagonal": masks.block_diagonal(16) | blocks, "not": ~blocks,
    }[composed]  # fmt: skip
    generator = torch.Generator().manual_seed(q_len)
    q, k, v = qkv(generator=generator, batch=kinds.shape[0], heads=2 * kinds.shape[1], kv_heads=1, q_len=q_len,
                  kv_len=kv_len, dim=8, dtype=torch.float64, requires_grad=True)  # fmt: skip
    dense = mask.dense(q_len, kv_len, *q.shape[:2]).expand(*q.shape[:3], kv_len) if kinds.shape[1] == 1 else None
    if dense is None:  # two heads of the map for four of q: refused, so the map is repeated
        mask = ca.BlockSparse(kinds.repeat_interleave(2, 1), block)
        dense = mask.dense(q_len, kv_len, *q.shape[:2])
    gain = torch.randn(q.shape[1], dtype=torch.float64, requires_grad=True)
    score = scores.softcap(5.0) >> (lambda s, b, h, i, j: s * gain[h])
    out = ca.attention(q, k, v, mask_mod=mask, score_mod=score, backend="streaming")
    exact = ca.attention(q, k, v, mask_mod=lambda b, h, i, j: dense[b, h, i, j], score_mod=score, backend="reference")
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v, gain), weight)
    theirs = torch.autograd.grad(exact, (q, k, v, gain), weight)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-8)


def test_new_indices_in_the_same_tensor_are_seen_by_the_next_call(generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, batch=1, heads=2, q_len=64, dim=8)
    indices = torch.zeros(1, 2, 4, 1, dtype=torch.int32)
    attend = ca.Attention(mask_mod=ca.BlockSparse.topk(indices, 16, 64, 64), backend="streaming")
    attend(q, k, v)
    indices[:] = torch.arange(4).view(4, 1)
    diagonal = ca.attention(q, k, v, mask_mod=masks.block_diagonal(16), backend="streaming")
    torch.testing.assert_close(attend(q, k, v), diagonal)


ONES = [torch.ones(1, 1, 256, 8)] * 3
LOOKS: dict[str, Callable[[ca.BlockSparse], Any]] = {
    "dense": lambda mask: mask.dense(256, 256).sum() / 128**2,
    "tiles": lambda mask: (mask.tiles(256, 256) == 2).sum(),
    "reference": lambda mask: ca.attention(*ONES, mask_mod=mask, backend="reference", return_lse=True)[1]
    .sub(8**0.5).exp().div(128**2).sum().round(decimals=3),
    "explain": lambda mask: int(str(ca.Attention(mask_mod=mask).explain(*ONES)).split(" of 4 visited")[0][-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_new_contents_are_seen_by_whoever_looks_how_many_blocks_there_are(name: str) -> None:
    tiles = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    mask = ca.BlockSparse(tiles, 128)
    assert LOOKS[name](mask) == 4
    tiles[0, 0, 0, 1] = False
    assert LOOKS[name](mask) == 3


def test_what_lies_beyond_the_blocks_is_not_visible() -> None:
    mask = ca.BlockSparse(torch.ones(1, 1, 2, 2, dtype=torch.bool), 16)
    seen = mask.dense(48, 40)
    assert seen[:, :, :32, :32].all() and not seen[:, :, 32:].any() and not seen[..., 32:].any()


def test_packed_sequences_are_cut_into_blocks_each(generator: torch.Generator) -> None:
    lengths = [40, 0, 32, 17]
    kinds = torch.randint(0, 2, (4, 2, 3, 3), generator=generator).bool()
    mask = ca.BlockSparse(kinds, 16) & causal()
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    out = ca.attention(q, k, v, mask_mod=mask, varlen=ca.Varlen(cu), backend="streaming")
    for b, length in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        one = ca.BlockSparse(kinds[b : b + 1], 16) & causal()
        dense = one.dense(48, 48, 1, 2)
        alone = ca.attention(
            *(t[rows].transpose(0, 1)[None] for t in (q, k, v)),
            mask_mod=lambda b, h, i, j, dense=dense: dense[0, h, i, j], backend="reference",
        )  # fmt: skip
        torch.testing.assert_close(out[rows], alone[0].transpose(0, 1), rtol=1e-9, atol=1e-9)
        assert out[rows].shape[0] == length


def test_copies_and_pickles() -> None:
    tiles = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    mask = ca.BlockSparse(tiles, 16)
    for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(again.dense(32, 32), mask.dense(32, 32))


MAP = torch.ones(1, 1, 2, 2, dtype=torch.bool)
INT = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
FLAT = torch.zeros(3, dtype=torch.int32)

BAD = {
    "a_list": (lambda: ca.BlockSparse([[1]]), errors.NotATensor, "tiles"),
    "floats": (lambda: ca.BlockSparse(MAP.float(), 16), errors.UnsupportedIndexDType, "int8"),
    "two_dimensions": (lambda: ca.BlockSparse(MAP[0, 0], 16), errors.WrongRank, "Tkv"),
    "no_blocks": (lambda: ca.BlockSparse(MAP[:, :, :0], 16), errors.EmptyDimension, "blocks"),
    "block_of_24": (lambda: ca.BlockSparse(MAP, 24), errors.UnsupportedBlockSize, "multiples of 16"),
    "three_sizes": (lambda: ca.BlockSparse(MAP, (16, 16, 16)), errors.UnsupportedBlockSize, "multiples of 16"),
    "float_indices": (lambda: ca.BlockSparse.topk(MAP, 16, 32, 32), errors.UnsupportedIndexDType, "int32"),
    "too_few_rows": (lambda: ca.BlockSparse.topk(INT, 16, 64, 32), errors.ShapeMismatch, "2 query blocks"),
    "no_length": (lambda: ca.BlockSparse.topk(INT, 16, 0, 32), errors.InvalidLength, "q_len"),
    "short_indptr": (lambda: ca.BlockSparse.from_csr(FLAT, FLAT, 16, 64, 64), errors.ShapeMismatch, "indptr"),
    "indptr_of_two": (lambda: ca.BlockSparse.from_csr(INT[0], FLAT[None], 16, 16, 16), errors.WrongRank, "indices"),
    "pairs_that_are_none": (
        lambda: ca.BlockSparse.from_coo(FLAT, FLAT[:2], 16, 64, 64), errors.ShapeMismatch, "pairs"
    ),
    "other_heads": (
        lambda: ca.BlockSparse.from_coo(INT[:, 0].expand(1, 2, 2), INT[:, 0].expand(1, 2, 2)[:, :1].expand(1, 3, 2),
                                        16, 32, 32), errors.ShapeMismatch, "make both equal or 1"
    ),
    "no_block_mask": (lambda: ca.BlockSparse.from_block_mask(MAP), errors.NotATensor, "BlockMask"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_names_no_blocks_is_refused(name: str) -> None:
    make, error, words = BAD[name]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 1, 3, 2), "3 blocks of 16 queries"), ((1, 1, 2, 1), "1 blocks of 16 keys"), ((3, 1, 2, 2), "batch 3"),
     ((1, 4, 2, 2), "query heads 4")],
)  # fmt: skip
def test_blocks_of_another_call_are_refused(shape: tuple[int, ...], words: str, generator: torch.Generator) -> None:
    q, k, v = qkv(generator=generator, batch=2, heads=2, q_len=32, dim=8)
    mask = ca.BlockSparse(torch.ones(shape, dtype=torch.bool), 16) & causal()
    with pytest.raises(errors.BlockMaskMismatch, match=words):
        ca.attention(q, k, v, mask_mod=mask, backend="streaming")


def written(tiles: torch.Tensor, kind: int) -> ca.BlockSparse:
    made = ca.BlockSparse(tiles, 16)
    tiles.fill_(kind)
    return made


@pytest.mark.parametrize("kind", [7, -1])
def test_a_map_of_kinds_that_there_are_not_is_refused_when_it_is_made_of_cpu_tensors(kind: int) -> None:
    with pytest.raises(errors.BlocksOutOfRange, match="tiles has numbers"):
        ca.BlockSparse(torch.full((1, 1, 2, 2), kind, dtype=torch.int8), 16)


OUT_OF_RANGE = {
    "tiles": lambda: written(MAP.to(torch.int8), 3),
    "indices": lambda: ca.BlockSparse.topk(INT + 2, 16, 32, 32),
    "indptr": lambda: ca.BlockSparse.from_csr(torch.tensor([0, 2, 1]), torch.tensor([0, 1]), 16, 32, 32),
    "rows": lambda: ca.BlockSparse.from_coo(torch.tensor([0, 5]), torch.tensor([0, 1]), 16, 32, 32),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_that_name_no_block_are_refused_where_contents_are_checked(
    name: str, generator: torch.Generator
) -> None:
    q, k, v = qkv(generator=generator, batch=1, heads=1, q_len=32, dim=8)
    attend = ca.Attention(mask_mod=OUT_OF_RANGE[name](), backend="streaming")
    attend(q, k, v)
    with ca.debug_checks(), pytest.raises(errors.BlocksOutOfRange, match=name):
        attend(q, k, v)


def test_by_another_name_or_shifted_they_are_a_mask_that_reads_the_same_blocks() -> None:
    kinds = torch.randint(0, 3, (1, 2, 4, 4)).to(torch.int8)
    blocks = ca.BlockSparse(kinds, 16, partial=causal())
    whole = blocks.dense(64, 64, 1, 2)
    assert torch.equal(blocks.named("mine").dense(64, 64, 1, 2), whole)
    assert str(blocks.named("mine")).splitlines()[0] == "mine"
    assert torch.equal(blocks.shifted(h=1, q=20).dense(44, 64, 1, 1), whole[:, 1:, 20:])
    q = torch.randn(1, 2, 64, 16)
    with pytest.raises(errors.BlockMaskMismatch, match="4 blocks of 16 queries"):
        ca.attention(q[:, :, 20:], q, q, mask_mod=blocks.shifted(q=20))  # a part's blocks must be cut
