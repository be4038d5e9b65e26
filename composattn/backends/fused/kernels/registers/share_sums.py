"""What shares leave of a work tile's rows, and how others add it to their own."""

import functools
import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....primitives.equal_stream_k import EqualStreamK, MetPortion
from .....primitives.register_chunks import THREADS, load_part, store_part
from .....primitives.stream_k import StreamK
from .....primitives.turns import arrive_if, publish_if, put_if, read, wait_for
from .....primitives.values import Fixed
from ...tiles.tiling import STATISTICS


class LeftSums(Fixed):
    """Sums of a thread's rows, to which each adds what the thread of its number in another block left."""

    def __init__(self, left: cute.Tensor, rows: Any) -> None:
        self.left, self.rows, me = left, rows, rows.me
        self.warp, self.thread, self.lane = me.number * (THREADS // 32) + me.thread // 32, me.thread, me.lane
        self.columns = cute.size(rows.output, mode=[1])
        self.count, self.of_statistics = (rows.shape.rows * n for n in (self.columns, STATISTICS))
        self.before = me.number * THREADS * (self.count + self.of_statistics)

    def sums(self) -> cute.Tensor:
        """The rows' own."""
        found = cute.make_rmem_tensor(self.count, Float32)
        for r in range(self.rows.shape.rows):
            for c in range(self.columns):
                found[self.index(r, c)] = self.rows.output[r, c]
        return found

    def index(self, r: int, c: int) -> int:
        """The place of a row's column among a thread's sums: pairs of columns, of each of its rows."""
        return c // 2 * 2 * self.rows.shape.rows + 2 * r + c % 2  # type: ignore[no-any-return]

    def statistics(self) -> cute.Tensor:
        """The rows' own."""
        softmax, found = self.rows.softmax, cute.make_rmem_tensor(self.of_statistics, Float32)
        found.fill(0.0)
        kept = [softmax.maximum, softmax.total] + ([] if softmax.highest is None else [softmax.highest])
        for i, of_rows in enumerate(kept):
            for r in range(self.rows.shape.rows):
                found[self.rows.shape.rows * i + r] = of_rows[r]
        return found

    def put(self, place: Int32) -> None:
        """The rows' sums to memory, by each warp."""
        statistics = self.statistics()
        sums, others = self._memory(place)
        store_part(sums, self.sums(), 0, self.thread)
        store_part(others, statistics, 0, self.thread)
        cute.arch.sync_warp()

    def add(self, place: Int32) -> None:
        """What lies there to the rows."""
        registers, statistics = (cute.make_rmem_tensor(n, Float32) for n in (self.count, self.of_statistics))
        self.get(place, registers, statistics)
        self.join(registers, statistics)

    def get(self, place: Int32, registers: cute.Tensor, statistics: cute.Tensor) -> None:
        """What lies there."""
        sums, others = self._memory(place)
        load_part(others, statistics, 0, self.thread)
        load_part(sums, registers, 0, self.thread)

    def join(self, registers: cute.Tensor, statistics: cute.Tensor) -> None:
        """Adds these sums to the rows, each by its maximum."""
        rows = self.rows
        for r in range(rows.shape.rows):
            own, other = rows.softmax.join(r, *(statistics[rows.shape.rows * i + r] for i in range(3)))
            for c in range(self.columns):
                rows.output[r, c] = rows.output[r, c] * own + registers[self.index(r, c)] * other

    def _memory(self, place: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The group's part of what was left: sums, statistics."""
        start = self.left[place, None].iterator + self.before
        behind = start + THREADS * self.count
        numbers = cute.make_layout(1)
        return cute.make_tensor(start, numbers), cute.make_tensor(behind, numbers)


class ShareSums(LeftSums):
    """What a share of the last rounds leaves, and the next one takes."""

    def __init__(self, shares: StreamK, rows: Any) -> None:
        super().__init__(shares.left, rows)
        self.shares = shares

    def leave(self, share: Int32) -> None:
        """The rows' sums, and a flag up behind them, for each warp."""
        self.put(share)
        publish_if(self._flag(share), Int32(1), self.lane == 0)

    def take(self, share: Int32) -> None:
        """Adds what the share left to the rows; the flag is down again."""
        wait_for(self._flag(share), Int32(1))
        cute.arch.sync_warp()
        put_if(self._flag(share), Int32(0), self.lane == 0)
        self.add(share)

    def _flag(self, share: Int32) -> cute.Pointer:
        return self.shares.flags[share, None].iterator + self.warp  # type: ignore[no-any-return]


class MetSums(LeftSums):
    """What equal shares leave of a tile, which the warp that comes last adds up; it has rows, or leaves nothing.

    Made when a portion begins: others are mostly there by then, if the tile ends in it, and nobody has to look again.
    """

    def __init__(self, shares: EqualStreamK, rows: Any, portion: MetPortion) -> None:
        super().__init__(shares.left, rows)
        self.shares, self.portion = shares, portion
        inside = [rows.row_place(r)[2] for r in range(rows.shape.rows)]
        self.has_rows = cute.arch.vote_any_sync(functools.reduce(operator.or_, inside))
        self.mine, self.others = portion.number - portion.first, portion.count - 1
        self.arrived = shares.arrived[portion.first, None].iterator + self.warp
        self.seen = read(self.arrived)

    @cute.jit
    def is_done(self) -> Boolean:
        """Whether the tile is, with this portion, and the rows have the sums of all of them.

        Who finds all others there leaves nothing.
        """
        done = Boolean(True)
        if self.others > 0:
            done = Boolean(False)
            if self.has_rows:
                before = self.others
                # what one lane has seen another one that read it a moment earlier may not have
                if cute.arch.vote_any_sync(self.seen != self.others):
                    self.put(self.place(self.mine))
                    before = cute.arch.shuffle_sync(arrive_if(self.arrived, self.lane == 0), 0)
                    cute.arch.sync_warp()
                if before == self.others:
                    done = Boolean(True)
                    put_if(self.arrived, Int32(0), self.lane == 0)
                    self.add_all()
        return done

    @cute.jit
    def add_all(self):
        """The sums of all portions, in their order."""
        rows, own, statistics = self.rows, self.sums(), self.statistics()
        registers, of_others = (cute.make_rmem_tensor(n, Float32) for n in (self.count, self.of_statistics))
        rows.softmax.reset()
        rows.tOrO.fill(0.0)
        for i in cutlass.range(self.portion.count, unroll=1):
            if i == self.mine:
                registers.store(own.load())
                of_others.store(statistics.load())
            else:
                self.get(self.place(i), registers, of_others)
            self.join(registers, of_others)

    def place(self, i: Int32) -> Int32:
        """Where the tile's i-th portion lies."""
        return self.shares.place(self.portion.first, i)  # type: ignore[no-any-return]
