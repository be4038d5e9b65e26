"""Tables of work: every query tile of every sequence once, in the order of the keys that it visits."""

from __future__ import annotations

import random

import pytest
import torch

from composattn.analysis.bands import EVERYTHING, TileInterval, tile_intervals
from composattn.analysis.strips import Strips
from composattn.analysis.tile_lists import Extent, KeyLists
from composattn.backends.fused.tiles.work import TableOrder, WorkTables, ascends, work_tables
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import Order
from composattn.call.sequences import NO_SEQUENCES, Sequences
from composattn.mods.mask import Mask

TILE = 16
ORDERS: tuple[Order, ...] = ("in_order", "longest_first", "shortest_first")
DOCUMENT = torch.arange(300) // 70
MASKS = {
    "everything": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "anticausal": lambda b, h, q, kv: q <= kv,
    "window-by-head": lambda b, h, q, kv: (q >= kv) & (q - kv < 20 + 30 * h),
    "document": lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv],
}


def intervals(name: str) -> tuple[TileInterval, ...]:
    mask = MASKS[name]
    return EVERYTHING if mask is None else tile_intervals(Mask.of(mask).expr)


def problem(batch: int, q_len: int, kv_len: int, layout: Layout = DENSE) -> Problem:
    return Problem(batch, 2, 2, q_len, kv_len, 64, 64, torch.bfloat16, torch.device("cpu"), layout=layout)


def visible_tiles(name: str, b: int, m: int, q_len: int, kv_len: int) -> int:
    """Tiles of keys with something visible, of both heads together, from the mask itself."""
    q, kv = torch.arange(m * TILE, min(m * TILE + TILE, q_len)), torch.arange(kv_len)
    count = 0
    for h in range(2):
        shape = (len(q), kv_len)
        mask = MASKS[name]
        seen = torch.ones(shape, dtype=torch.bool) if mask is None else mask(b, h, q[:, None], kv[None]).expand(shape)
        count += len((seen.any(0).nonzero() // TILE).unique())
    return count


def packed(rng: random.Random, name: str) -> tuple[Problem, Sequences, list[int], list[int]]:
    batch = rng.randint(1, 6)
    q_lens, kv_lens = ([rng.choice((0, 1, 15, 16, 17, 40, 150, 299)) for _ in range(batch)] for _ in range(2))
    cu_q, cu_kv = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (q_lens, kv_lens))
    return (
        problem(batch, sum(q_lens), sum(kv_lens), Layout("packed", "packed")),
        Sequences(cu_q, cu_kv),
        q_lens,
        kv_lens,
    )


@pytest.mark.parametrize("name", MASKS)
def test_packed_tiles_come_once_and_longest_first(name: str) -> None:
    rng = random.Random(1)
    for _ in range(20):
        of, sequences, q_lens, kv_lens = packed(rng, name)
        table = WorkTables(of, intervals(name), TILE, TILE, "longest_first")(sequences).tolist()
        there = [(b, m) for b, m in table if b >= 0]
        assert table[: len(there)] == [list(x) for x in there], "tiles that are not there come last"
        assert sorted(there) == [(b, m) for b, n in enumerate(q_lens) for m in range(-(-n // TILE))]
        heads = 1 if name != "window-by-head" else 2
        work = [visible_tiles(name, b, m, q_lens[b], kv_lens[b]) * heads // 2 for b, m in there]
        assert work == sorted(work, reverse=True)


def test_dense_tiles_in_every_order() -> None:
    of, bounds = problem(2, 290, 290), intervals("document")
    by_order = {order: WorkTables(of, bounds, TILE, TILE, order)(NO_SEQUENCES).tolist() for order in ORDERS}
    everything = [[b, m] for b in range(2) for m in range(19)]
    assert by_order["in_order"] == everything
    work = {o: [visible_tiles("document", b, m, 290, 290) for b, m in t] for o, t in by_order.items()}
    assert work["longest_first"] == sorted(work["in_order"], reverse=True)
    assert work["shortest_first"] == sorted(work["in_order"])
    assert all(sorted(t) == everything for t in by_order.values())


@pytest.mark.parametrize("columns", [48, 64, 100])  # an odd and an even number of strips, and one that reaches beyond
@pytest.mark.parametrize("order", [*ORDERS, "last_keys_first"])
def test_tiles_of_strips_that_wait_come_behind_those_that_they_wait_for(order: TableOrder, columns: int) -> None:
    strips = Strips(columns, 8)
    of, counts = problem(2 * strips.count, 290, 290), torch.randint(9, (2 * strips.count, 2, 19))
    table = WorkTables(of, None, TILE, TILE, order, strips)(NO_SEQUENCES, counts)
    assert sorted(table.tolist()) == [[b, m] for b in range(of.batch) for m in range(19)]
    place = {(b, m): n for n, (b, m) in enumerate(table.tolist())}
    adding = [(b, m) for b, m in place if strips.adds(b % strips.count)]
    assert len(adding) == 2 * (strips.count // 2) * 19
    for b, m in adding:
        neighbours = [n for n in (b - 1, b + 1) if n // strips.count == b // strips.count]
        assert neighbours and all(not strips.adds(n % strips.count) for n in neighbours)
        assert all(place[n, m] < place[b, m] for n in neighbours)
    if order == "last_keys_first":  # in a fixed order dQ's parts wait for those of later keys
        assert all(place[b, m] < place[b, m - 1] for b, m in place if m)


def test_the_last_tile_is_the_longest_where_the_mask_alone_says_so() -> None:
    of = problem(2, 290, 290)
    said = {name: ascends(of, intervals(name), TILE, TILE) for name in MASKS}
    assert said == {
        "everything": True, "causal": True, "window-by-head": True, "anticausal": False, "document": None,
    }  # fmt: skip


def test_lists_of_tiles_order_the_work_as_bands_do() -> None:
    rng = random.Random(2)
    mask = Mask.of(MASKS["window-by-head"]).expr
    for _ in range(5):
        of, sequences, *_ = packed(rng, "window-by-head")
        lists = KeyLists(mask, Extent(300, 300, of.batch, 2, of.device), (TILE, TILE))
        counts, _ = lists.of_call(queries=(sequences.cu_q, None), keys=(sequences.cu_k, None))
        by_lists = WorkTables(of, None, TILE, TILE, "longest_first")(sequences, counts)
        by_bands = WorkTables(of, intervals("window-by-head"), TILE, TILE, "longest_first")(sequences)
        assert torch.equal(by_lists, by_bands)


def test_a_table_is_made_again_only_when_lengths_are_written() -> None:
    of, sequences, *_ = packed(random.Random(3), "causal")
    bounds = intervals("causal")
    tables = work_tables(of, bounds, TILE, TILE, "longest_first")
    assert work_tables(of, bounds, TILE, TILE, "longest_first") is tables, "layers share them"
    first = tables(sequences)
    assert tables(sequences) is first
    assert sequences.cu_q is not None
    sequences.cu_q.zero_()
    assert (tables(sequences)[:, 0] == -1).all()


def test_tensors_that_count_no_writes_are_read_every_time() -> None:
    with torch.inference_mode():
        of, sequences, *_ = packed(random.Random(3), "causal")
    tables = WorkTables(of, intervals("causal"), TILE, TILE, "longest_first")
    first = tables(sequences)
    with torch.inference_mode():
        assert sequences.cu_q is not None
        sequences.cu_q.zero_()
    assert not torch.equal(tables(sequences), first)
