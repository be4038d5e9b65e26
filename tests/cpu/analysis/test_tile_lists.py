"""Lists of visited tiles: all that is visible, once; in order; up to date; made only where bands tell too little."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention

import composattn as ca
from benchmarks.host_work import Operations
from composattn import errors
from composattn.analysis import tile_lists as block_map
from composattn.analysis.dense import dense
from composattn.analysis.tile_lists import Extent, KeyLists, QueryLists, made_lists, reason_for_lists
from composattn.analysis.tiles import EMPTY, FULL
from composattn.call.block_sparse import Table
from composattn.mods import masks
from composattn.mods.mask import Mask
from tests.cpu.analysis.random_masks import RandomMask
from tests.dense_tiles import tiles_of

CPU = torch.device("cpu")


def listed_keys(lists: tuple[torch.Tensor, ...], b: int, h: int, m: int) -> tuple[list[int], list[int]]:
    """(tiles with the test, tiles without) of a query tile."""
    counts, tiles = lists
    b, h = min(b, counts.shape[1] - 1), min(h, counts.shape[2] - 1)
    partial, full = counts[:, b, h, m].tolist()
    row = tiles[b, h, m].tolist()
    return row[:partial], row[partial : partial + full]


def listed_queries(lists: tuple[torch.Tensor, ...], b: int, h: int, n: int) -> list[tuple[int, bool, int]]:
    """(query tile, tested, how many kv tiles beyond visit it too) of a kv tile."""
    counts, tiles, before = lists
    b, h = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1)
    count = int(counts[b, h, n])
    entries = tiles[b, h, n, :count].tolist()
    return [(e // 2, bool(e % 2), k) for e, k in zip(entries, before[b, h, n, :count].tolist(), strict=True)]


def holds(mask: RandomMask | Mask, extent: Extent, tile: tuple[int, int]) -> None:
    """Both lists against the dense mask."""
    exact = tiles_of(dense(mask.expr, extent.q_len, extent.kv_len, extent.batch, extent.heads), tile)
    exact = exact.expand(extent.batch, extent.heads, -1, -1)
    keys, queries = (kind(mask.expr, extent, tile).of_call() for kind in (KeyLists, QueryLists))
    assert all(t.dtype is torch.int32 for t in (*keys, *queries))
    last_whole = extent.kv_len // tile[1]
    for b in range(extent.batch):
        for h in range(extent.heads):
            by_query = [listed_keys(keys, b, h, m) for m in range(exact.shape[2])]
            by_key = [listed_queries(queries, b, h, n) for n in range(exact.shape[3])]
            for m, (tested, free) in enumerate(by_query):
                assert tested == sorted(set(tested), reverse=True) and free == sorted(set(free), reverse=True)
                assert not set(tested) & set(free)
                for n, kind in enumerate(exact[b, h, m].tolist()):
                    assert kind == EMPTY or n in tested or n in free
                    assert n not in free or (kind == FULL and n < last_whole)
            visited = {(m, n) for m, (tested, free) in enumerate(by_query) for n in (*tested, *free)}
            assert {(m, n) for n, entries in enumerate(by_key) for m, _, _ in entries} == visited
            for n, entries in enumerate(by_key):
                assert [m for m, _, _ in entries] == sorted({m for m, _, _ in entries})
                for m, is_tested, before in entries:
                    assert is_tested or exact[b, h, m, n] == FULL
                    assert before == sum((m, other) in visited for other in range(n + 1, exact.shape[3]))


@pytest.mark.parametrize("part", range(4))
def test_lists_of_random_masks_visit_all_that_is_visible_once(part: int) -> None:
    start = int(os.environ["COMPOSATTN_TEST_SEED"]) * 100_000 + 80_000 + part * 1000
    for seed in range(start, start + 100):
        mask = RandomMask(seed)
        try:
            holds(mask, Extent(mask.q_len, mask.kv_len, mask.batch, mask.heads, CPU), mask.tile)
        except BaseException as error:
            raise AssertionError(f"RandomMask({seed}), tile {mask.tile}: {mask.expr}: {error}") from error


def test_bands_settle_what_tiles_alone_do_not() -> None:
    ids = torch.tensor([5, 1, 5, 2] * 16)  # runs of equal ids from 0 to 62: their ends are known a row
    mask = masks.document(ids) & (lambda b, h, q, kv: (q * kv) % 7 != 3)
    extent = Extent(64, 64, 1, 1, CPU)
    holds(mask, extent, (8, 8))


def test_divisors_may_be_negative() -> None:
    mask = Mask.of(lambda b, h, q, kv: (q * kv % -33 > -20) & (q % -33 < kv // -3) | (kv % -7 == q // -5))
    holds(mask, Extent(77, 130, 1, 1, CPU), (16, 48))


@pytest.mark.parametrize("tile", [(16, 16), (8, 24)])
def test_lists_of_packed_sequences_are_those_of_each(tile: tuple[int, int]) -> None:
    q_lens, kv_lens = [40, 0, 17, 64], [33, 20, 0, 64]
    grid = masks.neighborhood((8, 8), (3, 5)) | masks.causal("bottom_right")
    cu_q = torch.tensor([0, *q_lens]).cumsum(0).int()
    used_k = torch.tensor(kv_lens).int()
    lists = KeyLists(grid.expr, Extent(64, 64, 4, 2, CPU), tile)
    queries = QueryLists(grid.expr, Extent(64, 64, 4, 2, CPU), tile)
    keys = lists.of_call(None, None, (cu_q, None), (None, used_k))
    mirrored = queries.of_call(None, None, (cu_q, None), (None, used_k))
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        by_query = [listed_keys(keys, b, 0, m) for m in range(keys[0].shape[-1])]
        seen = {(m, n) for m, (tested, free) in enumerate(by_query) for n in (*tested, *free)}
        rows = range(mirrored[0].shape[-1])
        assert seen == {(m, n) for n in rows for m, _, _ in listed_queries(mirrored, b, 0, n)}
        if not q_len or not kv_len:
            assert not seen
            continue
        exact = tiles_of(dense(grid.expr, q_len, kv_len), tile)[0, 0]
        assert {(m, n) for m, n in exact.nonzero().tolist()} <= seen
        for m, (_, free) in enumerate(by_query):
            assert all(exact[m, n] == FULL and (n + 1) * tile[1] <= kv_len for n in free)


def test_lists_follow_what_the_mask_reads() -> None:
    seen = torch.zeros(4, 4, dtype=torch.bool)
    limit = ca.scalar(100)
    mask = ca.mask(lambda b, h, q, kv: seen[q // 8, kv // 8] & (q + kv < limit))
    lists = KeyLists(mask.expr, Extent(32, 32, 1, 1, CPU), (8, 8))
    counts, tiles = lists.of_call()
    assert counts.sum() == 0
    seen[1, 2] = True
    assert all(old is new for old, new in zip((counts, tiles), lists.of_call(), strict=True))  # the same memory
    assert counts[1, 0, 0].tolist() == [0, 1, 0, 0] and tiles[0, 0, 1, 0] == 2
    limit.value = 10
    assert lists.of_call()[0].sum() == 0
    assert lists.of_call(numbers={limit: 100})[0].sum() == 1  # of the moment of a forward
    assert lists.of_call(given={lists.sources[0]: torch.ones_like(seen)}, numbers={limit: 100})[0].sum() == 16


def test_nothing_is_computed_again_while_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.rand(64) < 0.5
    mask = ca.mask(lambda b, h, q, kv: table[(q * 3 + kv) % 64])
    lists = KeyLists(mask.expr, Extent(64, 64, 1, 1, CPU), (16, 16))
    lists.of_call()
    monkeypatch.setattr(lists._own, "run", None)
    lists.of_call()
    table[3] = True
    with pytest.raises(TypeError):
        lists.of_call()


SORTED, OFFSETS = torch.arange(200) // 37, torch.tensor([0, 60, 200])
WHY = {
    "causal": (masks.causal(), None), "window": (masks.sliding_window((10, 3)), None),
    "sorted_documents": (masks.document(SORTED), None),
    "documents_apart": (masks.document(SORTED[torch.randperm(200)]), "lie apart"),
    "documents_by_offsets": (masks.document(offsets=OFFSETS), None),
    "offsets_of_more_keys": (masks.document(offsets=OFFSETS, kv_offsets=2 * OFFSETS), None),
    "grid": (masks.neighborhood((10, 20), (3, 3)), "no bounds"),
    "dilated": (masks.dilated_window((50, 50), 4), None),
    "far_dilated": (masks.dilated_window((150, 150), 40), "tiles apart"),
    "scattered_globals": (masks.global_tokens(torch.tensor([3, 100]), "keys"), "no bounds"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHY)
def test_lists_are_made_where_bands_tell_too_little(name: str) -> None:
    mask, why = WHY[name]
    extent = Extent(200, 200, 2, 2, CPU)
    reason = reason_for_lists(KeyLists, mask.expr, extent, (16, 16))
    assert (reason is None) == (why is None) and (why is None or why in str(reason))
    made = made_lists(KeyLists, mask.expr, extent, (16, 16))
    assert made is made_lists(KeyLists, mask.expr, extent, (16, 16))


def test_the_backward_takes_lists_where_bands_tell_too_little_of_queries() -> None:
    extent = Extent(200, 200, 2, 2, CPU)
    reasons = {n: reason_for_lists(QueryLists, m.expr, extent, (16, 16)) for n, (m, _) in WHY.items()}
    # a global key is seen from every row or from none
    wanted = {"offsets_of_more_keys", "documents_apart", "grid", "far_dilated"}
    assert {name for name, reason in reasons.items() if reason} == wanted


def test_lists_that_would_be_too_large_are_not_made() -> None:
    mask = masks.neighborhood((1 << 11, 1 << 11), (7, 7))
    assert reason_for_lists(KeyLists, mask.expr, Extent(1 << 22, 1 << 22, 1, 1, CPU), (128, 128)) is None
    unbounded = Extent(1 << 19, 1 << 19, 64, 1, CPU, ragged=True, unbounded=True)
    assert reason_for_lists(KeyLists, masks.causal().expr, unbounded, (128, 128)) is None
    with pytest.raises(errors.UnknownLength, match="max_seqlen_q"):
        reason_for_lists(KeyLists, mask.expr, unbounded, (128, 128))


def test_large_grids_are_analysed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks.neighborhood((10, 20), (3, 3)) & masks.padding(torch.tensor([150, 90]))
    mask = mask & (lambda b, h, q, kv: TABLE[h, q] <= TABLE[h, kv] + 3)
    extent = Extent(200, 200, 2, 2, CPU)
    whole = [kind(mask.expr, extent, (8, 16)).of_call() for kind in (KeyLists, QueryLists)]
    monkeypatch.setattr(block_map, "_AT_ONCE", 200)
    parts = [kind(mask.expr, extent, (8, 16)).of_call() for kind in (KeyLists, QueryLists)]
    assert all(torch.equal(x, y) for a, b in zip(whole, parts, strict=True) for x, y in zip(a, b, strict=True))
    holds(mask, extent, (8, 16))


TABLE = torch.randint(0, 9, (2, 170), generator=torch.Generator().manual_seed(3))


def on_meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without contents: whoever looks at them on the host fails."""
    return torch.empty(shape, dtype=dtype, device="meta")


FLOATS, BOOLS = on_meta(2, 250, dtype=torch.float32), on_meta(99, dtype=torch.bool)

UNSEEN = {
    "grid_cut": lambda: masks.neighborhood((6, 42), (3, 5)),
    "documents": lambda: masks.document(on_meta(250)) & masks.causal(),
    "topk": lambda: ca.BlockSparse.topk(on_meta(2, 2, 4, 3), 64, 250, 250),
    "kinds": lambda: ca.BlockSparse(on_meta(1, 2, 6, 8, dtype=torch.int8), (48, 32), partial=masks.causal()),
    "floats": lambda: ca.mask(lambda b, h, q, kv: FLOATS[h, q] < FLOATS[h, kv] * 2),
    "hashed": lambda: ca.mask(lambda b, h, q, kv: BOOLS[(q * 7919 + kv) % 99]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_lists_are_made_without_a_look_at_the_data(name: str) -> None:
    extent = Extent(250, 250, 2, 2, torch.device("meta"))
    for kind in (KeyLists, QueryLists):
        assert all(t.device.type == "meta" for t in kind(UNSEEN[name]().expr, extent, (64, 48)).of_call())


def test_a_mask_that_nothing_is_known_of_is_let_go() -> None:
    table = torch.rand(20, 20) < 0.5
    mask = ca.mask(lambda b, h, q, kv: table[q, kv])
    lists = made_lists(KeyLists, mask.expr, Extent(20, 20, 1, 1, CPU), (4, 4))
    assert lists is not None and lists.of_call()
    seen = weakref.ref(mask.expr)
    del mask, lists
    gc.collect()
    assert seen() is None


IDS = torch.arange(1000) // 170
OF_BLOCKS = {
    "causal documents": lambda b, h, q, kv: (q >= kv) & (IDS[q] == IDS[kv]),
    "a window": lambda b, h, q, kv: (q >= kv) & (q - kv < 300),
}


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_blocks_that_torch_lists_say_what_bands_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of the mask_mod add nothing to them, and cost operations for each new BlockMask."""
    made = flex_attention.create_block_mask(OF_BLOCKS[name], None, None, 1000, 1000, device="cpu")
    mask = ca.BlockSparse.from_block_mask(made).expr
    extent, cuts = Extent(1000, 1000, 1, 1, torch.device("cpu")), ((KeyLists, (64, 64)), (QueryLists, (80, 128)))
    lean = [kind(mask, extent, tile) for kind, tile in cuts]
    monkeypatch.setattr(Table, "says_visible", False)
    for few, (kind, tile) in zip(lean, cuts, strict=True):
        more = kind(mask, extent, tile)
        assert more.bands and not few.bands
        assert all(map(torch.equal, few.of_call(), more.of_call()))


def test_lists_of_a_new_block_mask_take_few_operations() -> None:
    mask = ca.BlockSparse.from_block_mask(
        flex_attention.create_block_mask(OF_BLOCKS["causal documents"], None, None, 1000, 1000, device="cpu")
    )
    lists, counted = KeyLists(mask.expr, Extent(1000, 1000, 1, 1, torch.device("cpu")), (64, 64)), 0
    for _ in range(4):
        mask.leaves[0].add_(0)  # counts as written to
        with Operations() as operations:
            lists.of_call()
        counted = operations.counts.total()
    assert counted <= 90  # 130 with bands, and all operations as they stand
