"""Edges between roles and a block's barriers: counts and numbers follow from who takes part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass.cute as cute

from composattn.primitives.barriers import Barriers
from composattn.primitives.pipelines import BoundEdge, Copies, Edge, Slot, Warps


@dataclass
class Commit:
    """An end as a tensor core is one: arrives by itself when its products are done."""

    arrivals: int = 1
    arrived: list[int] = field(default_factory=list)

    def arrive(self, barriers: Any, stage: Any, lane: Any) -> None:
        self.arrived.append(barriers + stage)


@pytest.mark.parametrize(
    ("producer", "consumers", "full", "empty"),
    [(Copies(4096), Warps(12), 1, 12), (Warps(1), Warps(9), 1, 9), (Copies(4096), Commit(), 1, 1)],
)
def test_a_barrier_waits_for_all_who_take_part_at_its_end(
    producer: Any, consumers: Any, full: int, empty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[int, int] = {}
    monkeypatch.setattr(cute.arch, "mbarrier_init", counts.__setitem__)
    edge = Edge(3, producer, consumers)
    BoundEdge(edge, 100).init()
    assert counts == {**dict.fromkeys(range(100, 103), full), **dict.fromkeys(range(103, 106), empty)}
    assert len(counts) == edge.barriers


def test_another_kind_of_end_brings_its_own_arrival() -> None:
    commit = Commit()
    edge = BoundEdge(Edge(2, Copies(4096), commit), 100)
    edge.release(Slot(2, 1, 0), lane=None)
    assert commit.arrived == [edge.empty + 1] == [103]


def test_edges_of_a_block_lie_behind_one_another() -> None:
    class Memory:
        def allocate_array(self, kind: Any, count: int) -> int:
            assert count == 2 * (1 + 4)
            return 100

    q, kv = Edge.allocate(Memory(), [Edge(1, Copies(64), Warps(4)), Edge(4, Copies(64), Warps(4))])
    assert [q.full, q.empty, kv.full, kv.empty] == [100, 101, 102, 106]


def test_no_two_barriers_share_a_number_and_none_is_that_of_the_whole_block() -> None:
    barriers = Barriers()
    row, one = barriers.row(3, 128), barriers.one(384)
    assert [row[i].number for i in range(3)] + [one.number] == [1, 2, 3, 4]
    assert (row[2].threads, one.threads) == (128, 384)


def test_a_block_has_fifteen_barriers_to_hand_out() -> None:
    barriers = Barriers()
    barriers.row(15, 128)
    with pytest.raises(AssertionError, match="15 barriers"):
        barriers.one(128)
