"""What shares leave of a work tile's rows, and how others add it to their own."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from .....primitives.register_chunks import THREADS, load_part, store_part
from .....primitives.stream_k import StreamK
from .....primitives.turns import publish_if, put_if, wait_for
from .....primitives.values import Fixed
from ...planning.plan import STATISTICS


class ShareSums(Fixed):
    """Sums of a thread's rows: what a share of the last rounds leaves, and that thread of the next one takes."""

    def __init__(self, shares: StreamK, rows: Any) -> None:
        self.shares, self.rows, me = shares, rows, rows.me
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

    def leave(self, share: Int32) -> None:
        """The rows' sums, and a flag up behind them, for each warp."""
        statistics = self.statistics()
        sums, others = self._memory(share)
        store_part(sums, self.sums(), 0, self.thread)
        store_part(others, statistics, 0, self.thread)
        cute.arch.sync_warp()
        publish_if(self._flag(share), Int32(1), self.lane == 0)

    def take(self, share: Int32) -> None:
        """Adds what the share left to the rows; the flag is down again."""
        wait_for(self._flag(share), Int32(1))
        cute.arch.sync_warp()
        put_if(self._flag(share), Int32(0), self.lane == 0)
        registers, statistics = (cute.make_rmem_tensor(n, Float32) for n in (self.count, self.of_statistics))
        sums, others = self._memory(share)
        load_part(others, statistics, 0, self.thread)
        load_part(sums, registers, 0, self.thread)
        self.join(registers, statistics)

    def join(self, registers: cute.Tensor, statistics: cute.Tensor) -> None:
        """Adds these sums to the rows, each by its maximum."""
        rows = self.rows
        for r in range(rows.shape.rows):
            own, other = rows.softmax.join(r, *(statistics[rows.shape.rows * i + r] for i in range(3)))
            for c in range(self.columns):
                rows.output[r, c] = rows.output[r, c] * own + registers[self.index(r, c)] * other

    def _memory(self, share: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The group's part of what was left: sums, statistics."""
        start = self.shares.left[share, None].iterator + self.before
        behind = start + THREADS * self.count
        numbers = cute.make_layout(1)
        return cute.make_tensor(start, numbers), cute.make_tensor(behind, numbers)

    def _flag(self, share: Int32) -> cute.Pointer:
        return self.shares.flags[share, None].iterator + self.warp  # type: ignore[no-any-return]
