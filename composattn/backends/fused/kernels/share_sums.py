"""What a share of the last rounds leaves of a work tile, and how the next one adds it to its own."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....primitives.register_chunks import THREADS, load_part, store_part
from ....primitives.shares import Shares
from ....primitives.turns import publish_if, wait_for
from ....primitives.values import Fixed
from ..tiling import STATISTICS


class ShareSums(Fixed):
    """Of a thread's rows, in the order of their registers: each takes what the same one of another block left."""

    def __init__(self, shares: Shares, rows: Any) -> None:
        self.shares, self.rows, me = shares, rows, rows.me
        self.warp, self.thread, self.lane = me.number * (THREADS // 32) + me.thread // 32, me.thread, me.lane
        self.before = me.number * THREADS * (cute.size(rows.tOrO) + STATISTICS)

    def leave(self, share: Int32) -> None:
        """The rows' sums to memory, and a flag up behind them, for each warp."""
        softmax, statistics = self.rows.softmax, cute.make_rmem_tensor(STATISTICS, Float32)
        statistics.fill(0.0)
        kept = [softmax.maximum, softmax.total] + ([] if softmax.highest is None else [softmax.highest])
        for i, of_rows in enumerate(kept):
            for r in range(self.rows.shape.rows):
                statistics[2 * i + r] = of_rows[r]
        sums, others = self._memory(share)
        store_part(sums, self.rows.tOrO, 0, self.thread)
        store_part(others, statistics, 0, self.thread)
        cute.arch.sync_warp()
        publish_if(self._flag(share), Int32(1), self.lane == 0)

    def take(self, share: Int32) -> None:
        """Adds what the share left to the rows, each by its maximum; the flag is down again."""
        rows = self.rows
        wait_for(self._flag(share), Int32(1))
        cute.arch.sync_warp()
        publish_if(self._flag(share), Int32(0), self.lane == 0)
        sums, others = self._memory(share)
        registers, statistics = cute.make_rmem_tensor_like(rows.tOrO), cute.make_rmem_tensor(STATISTICS, Float32)
        load_part(others, statistics, 0, self.thread)
        load_part(sums, registers, 0, self.thread)
        left = rows.products.rows_of(registers)
        for r in range(rows.shape.rows):
            own, other = rows.softmax.join(r, *(statistics[2 * i + r] for i in range(3)))
            for c in range(cute.size(left, mode=[1])):
                rows.output[r, c] = rows.output[r, c] * own + left[r, c] * other

    def _memory(self, share: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """The group's part of what a share leaves: sums, statistics."""
        start = self.shares.left[share, None].iterator + self.before
        behind = start + THREADS * cute.size(self.rows.tOrO)
        numbers = cute.make_layout(1)
        return cute.make_tensor(start, numbers), cute.make_tensor(behind, numbers)

    def _flag(self, share: Int32) -> cute.Pointer:
        return self.shares.flags[share, None].iterator + self.warp  # type: ignore[no-any-return]
