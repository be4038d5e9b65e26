"""A forward whose groups of threads have rows apart, with scores and output in registers: who copies, who computes."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .....primitives.cut_rows import load, partition
from .....primitives.emit_strips import KeyWords
from .....primitives.lanes import LANES
from .....primitives.ping_pong import PingPong
from .....primitives.values import choose, narrow, smaller
from ..forward import KeyCopies, Role
from .output_rows import OutputRows, RowGroup
from .share_sums import ShareSums

# Loops over kv tiles, each a copy of all that is done for a tile: 0.3 s of compiling. Where there would be more, or one
# tests in two ways, two loops take turns.
LOOPS = 3


class RowLoad(Role):
    """The copying warp: Q once per work tile, after the first K, or before it where its place is free by then.

    It draws the tiles where blocks do so.
    """

    @cute.jit
    def draw_tiles(self, number, slots):
        """Asks for a number behind a tile's copies: a microsecond later, but it goes to a block that is free sooner."""
        queue, lane = self.block.queue, cute.arch.lane_idx()
        turn = queue.edge.first
        while number < self.call.tiles:
            slots = self.visit_all(number, slots)
            number = queue.draw(lane)
            queue.announce(turn, number, lane)
            turn = turn.next()

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        call, early = self.call, self.tiling.q_stages > 1 or self.tiling.frees_queries
        tiles = self.kernel.kv_tiles(call, work)
        gQ = work.queries.tiles(call.tensors.q, work.h, (self.kernel.heads.box(self.kernel.rows), self.tiling.d))
        copies = self.copies(work)
        if tiles.count > 0:
            before = copies.source.locate(tiles.first)
            if const_expr(early):  # K waits for room behind keys of the tile before, Q for none
                self.start_queries(gQ, work, q_slot)
            copies.start_keys(before, k_slot)
            if const_expr(not early):
                self.start_queries(gQ, work, q_slot)
            q_slot = q_slot.next()
            k_slot = copies.behind(k_slot)
            for run in tiles.runs:
                for i in cutlass.range(run.count, unroll=1):
                    at = copies.source.locate(run.tile(i))
                    k_slot, v_slot = copies.follow(at, before, k_slot, v_slot)
                    before = at
            copies.start_values(before, v_slot)
            v_slot = copies.behind(v_slot)
        return q_slot, k_slot, v_slot

    def copies(self, work) -> KeyCopies:
        """Copies of a work tile's K and V."""
        block = self.block
        return KeyCopies(self, work, (block.k_edge, block.v_edge), (block.sK, block.sV))

    def start_queries(self, gQ, work, q_slot) -> None:
        """The rows of each group."""
        block, tma = self.block, self.call.tmas.q
        bar = block.q_edge.acquire(q_slot)
        for g in range(block.groups):
            tQsQ, tQgQ = partition(tma, block.queries(g, q_slot), gQ)
            load(tma, tQgQ, work.m * block.groups + g, tQsQ, bar)


class RowConsumer(RowGroup):
    """A group that takes turns with the others where the tiling says so."""

    def __init__(self, kernel, block, thread, scale_log2):
        super().__init__(kernel, block, thread, scale_log2)
        self.turns = PingPong(block.groups if self.tiling.pingpong else 1, block.turns)

    @cute.jit
    def clear_values(self, n, kv_len, v_slot):
        """V of kv tile `n` beyond the last key to zeros: a page holds anything there, and 0 * NaN is NaN."""
        self.block.v_edge.wait(v_slot)
        sV = self.block.sV[None, None, v_slot.index]
        first = kv_len - n * self.tiling.tile_n
        for row in cutlass.range(first + self.number, self.tiling.tile_n, self.block.groups, unroll=1):
            if self.thread < self.tiling.dv // 2:
                for column in cutlass.range_constexpr(2):
                    sV[row, self.thread * 2 + column] = self.block.dtype(0.0)
        cute.arch.fence_view_async_shared()
        self.sync_consumers()


class RowConsume(Role):
    """A group's rows of each work tile: `me`."""

    def __init__(self, kernel, call, me):
        super().__init__(kernel, call, me.block)
        self.me = me

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        rows = kernel.group_rows(me, kernel.mods, work, call.leaves(work, self.tiling.queries), q_slot)
        if tiles.count > 0:
            me.block.q_edge.wait(q_slot)
            k_slot, v_slot = self.walk(rows, tiles, k_slot, v_slot)
            if const_expr(not self.tiling.frees_queries):
                me.block.q_edge.release(q_slot, me.lane)
            q_slot = q_slot.next()
            rows.last_product(v_slot)
            v_slot = v_slot.next()
        rows.finish(call)
        return q_slot, k_slot, v_slot

    @cute.jit
    def walk(self, rows, tiles, k_slot, v_slot):
        """All of the tiles but the last one's product with V."""
        rows.first_scores(tiles, k_slot)
        self.clear_values(rows, tiles, v_slot)
        k_slot = k_slot.next()
        if const_expr(rows.loops(tiles) <= LOOPS):
            for tile_range in tiles.tile_ranges():
                k_slot, v_slot = rows.go_over(tile_range, k_slot, v_slot)
        else:
            tested, free = tiles.rounds()
            for n in cutlass.range(len(tested), unroll=1):
                k_slot, v_slot = rows.go_over(tested[n], k_slot, v_slot)
                k_slot, v_slot = rows.go_over(free[n], k_slot, v_slot)
        return k_slot, v_slot

    def clear_values(self, rows, tiles, v_slot) -> None:
        """V of the first tile, beyond the last key, where copies bring what lies there."""
        if self.plan.layout.kv == "paged":
            self.me.clear_values(tiles.first, rows.work.keys.length, v_slot)


class ConsumeApart(RowConsume):
    """`RowConsume` where each group has kv tiles of its own among those of all: it skips those before and behind."""

    @cute.jit
    def visit(self, work, slots):
        q_slot, k_slot, v_slot = slots
        me, call, kernel = self.me, self.call, self.kernel
        tiles = kernel.kv_tiles(call, work)
        own, before, behind = kernel.own_tiles(call, work, tiles, me.number)
        rows = kernel.group_rows(me, kernel.mods, work, call.leaves(work, self.tiling.queries), q_slot)
        if tiles.count > 0:
            me.block.q_edge.wait(q_slot)
            # all groups take a turn in each tile but their first one
            k_slot, v_slot = self.pass_by(before, smaller(before, tiles.count - 1), k_slot, v_slot)
            if own.count > 0:
                k_slot, v_slot = self.walk(rows, own, k_slot, v_slot)
                rows.last_product(v_slot)
                k_slot, v_slot = self.pass_by(behind, behind, k_slot, v_slot.next())
            me.block.q_edge.release(q_slot, me.lane)
            q_slot = q_slot.next()
        rows.finish(call)
        return q_slot, k_slot, v_slot

    @cute.jit
    def pass_by(self, count, turns, k_slot, v_slot):
        """Skips `count` tiles; in the first `turns` of them the group gives its turn to the next one."""
        me = self.me
        for i in cutlass.range(count, unroll=1):
            me.block.k_edge.wait(k_slot)  # released before it is full, a stage would count for the lap before
            me.block.k_edge.release(k_slot, me.lane)
            if i < turns:
                me.turns.take(me.number)
                me.turns.give(me.number)
            me.block.v_edge.wait(v_slot)
            me.block.v_edge.release(v_slot, me.lane)
            k_slot = k_slot.next()
            v_slot = v_slot.next()
        return k_slot, v_slot


class GroupRows(OutputRows[Any]):
    """A group's rows of one work tile, in registers: probabilities tOrP, output, the softmax's statistics.

    tSrQ are columns of Q that stay there too, None where all of them are read from shared memory.
    """

    def __init__(self, me: RowConsumer, mods, work, leaves, q_slot):
        super().__init__(me, mods, work, leaves, work.m * me.tiling.tile_m + me.number * me.rows + me.row)
        self.q_slot = q_slot
        self.tOrO.fill(0.0)
        self.tSrQ = self.products.resident_queries()
        strips = me.plan.strips
        if strips is not None:
            self.strip_words = KeyWords(self.mods, self.tile(None, Int32(0)), strips.wide)

    def probabilities(self, tSrS, n, ahead, tested, seen, first):
        """Scores of kv tile `n` to probabilities, in fp32, in place, and given; where `tested`, of what is `seen`."""
        scores = self.products.remembered(tSrS)
        tile = self.tile(scores, n)
        self.mods.apply_score(tile, ahead)
        if tested:
            self.hide(tile, seen)
        self.softmax.step(tile, self.rescale, first)
        self.count_tile(first)
        self.mods.drop(tile)
        self.mods.weigh(tile, ahead, bool(tested))
        return scores

    def read_beside(self, k_slot, ahead):
        """Adds to what mods have read ahead what lies beside K in shared memory."""

    def first_scores(self, tiles, k_slot):
        """Scores of the first of these kv tiles, which are all that the rows see."""
        self.tiles, n = tiles.count, tiles.first
        ahead, seen = self.mods.read_ahead(self.tile(None, n)), self.look(n)
        self.products.get_queries(self.tSrQ, self.q_slot, self.me.thread)
        if self.tiling.frees_queries:
            cute.arch.fence_view_async_shared()  # a copy will come over what was read, by all lanes
            cute.arch.sync_warp()
            self.block.q_edge.release(self.q_slot, self.me.lane)
        self.block.k_edge.wait(k_slot)
        tSrS = self.products.issue_scores(self.q_slot, k_slot, self.tSrQ)
        self.read_beside(k_slot, ahead)
        self.products.wait(0)
        self.block.k_edge.release(k_slot, self.me.lane)
        probabilities = self.probabilities(tSrS, n, ahead, True, seen, first=True)
        self.round(probabilities)

    def round(self, probabilities):
        """To tOrP: registers in order, as an accumulator's is that of the next product's left operand."""
        narrow(self.tOrP, probabilities)

    @cute.jit
    def go_over(self, tile_range, k_slot, v_slot):
        """Tiles of a range; gives the slots behind them."""
        for i in cutlass.range(tile_range.count, unroll=1):
            self.step(tile_range.tile(i), tile_range.tested, k_slot, v_slot)
            k_slot = k_slot.next()
            v_slot = v_slot.next()
        return k_slot, v_slot

    def issue(self, n, k_slot, v_slot):
        """Starts scores of kv tile `n` and the output of the tile before it; gives what mods read, and the scores."""
        ahead = self.mods.read_ahead(self.tile(None, n))
        self.block.k_edge.wait(k_slot)
        self.me.turns.take(self.me.number)
        tSrS = self.products.issue_scores(self.q_slot, k_slot, self.tSrQ)
        self.block.v_edge.wait(v_slot)
        self.products.issue_output(self.tOrO, self.tOrP, v_slot)
        self.me.turns.give(self.me.number)
        self.note_sums_if_doubled()  # under both products, which wait for nothing of it
        self.products.wait(1)
        return ahead, tSrS

    def step(self, n, tested, k_slot, v_slot):
        """Scores of kv tile `n` while the output of the tile before it accumulates."""
        seen = self.look(n) if tested else None
        ahead, tSrS = self.issue(n, k_slot, v_slot)
        if self.tiling.output_wait is None:
            self.block.k_edge.release(k_slot, self.me.lane)
        probabilities = self.probabilities(tSrS, n, ahead, tested, seen, first=False)
        if self.tiling.output_wait is not None:
            self.block.k_edge.release(k_slot, choose(self.is_negative(probabilities), Int32(LANES), self.me.lane))
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)
        self.round(probabilities)
        self.rescale_output()

    def is_negative(self, probabilities):
        """Whether one of them is, which none is: a release that hangs on it stands behind its exponential.

        The compiler moves a wait for products up over exponentials, but not over a release. So the output's product was
        waited for before any of them, and none ran under it: up to 7 % of D 128 (H200).
        """
        column = 0 if self.tiling.output_wait == "first" else self.me.shape.columns - 1
        return probabilities[0, column] < 0.0

    def last_product(self, v_slot):
        self.block.v_edge.wait(v_slot)
        self.products.issue_output(self.tOrO, self.tOrP, v_slot)
        self.products.wait(0)
        self.block.v_edge.release(v_slot, self.me.lane)

    def row_tile(self):
        return self.work.m * self.block.groups + self.me.number

    @cute.jit
    def finish(self, call):
        """O and the statistics of its rows, or where others have more of their keys, what is summed of them."""
        portion = self.work.portion
        if const_expr(portion is None):
            self.put_out(call)
        else:
            sums = ShareSums(call.shares, self)
            if portion.leaves:
                sums.leave(portion.number)
            else:
                if portion.takes:
                    sums.take(portion.number - 1)
                self.put_out(call)

    def put_out(self, call):
        """O, its rows normalised, and what is asked for of LSE and the largest scores to their tensors."""
        row_lse = self.store(call)
        self.store_statistics(call, self.softmax, row_lse, self.me.lane)
