"""The backward kernel except for its tensor core: host function, work tiles, what they load and what they visit."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ....analysis.strips import parts_of
from ....primitives.arithmetic import ONE_BY_ONE, Arithmetic
from ....primitives.block_pair import rank
from ....primitives.cut_rows import bulk_copy, descriptors, load, partition
from ....primitives.dynamic_scheduler import DynamicScheduler
from ....primitives.emit import Leaves
from ....primitives.emit_backward import BackwardMods
from ....primitives.emit_metadata import KeyTileMetadata
from ....primitives.emit_tiles import query_tiles_of
from ....primitives.padded_tiles import PaddedTiles, claims_of, cleared_of, counter_of, statistics_of, written_of
from ....primitives.pieces import Pieces
from ....primitives.pipelines import Slot, start_edges
from ....primitives.q_tiles import ListedQueryRun, QueryRun
from ....primitives.seqlen import Rows
from ....primitives.strip_rows import StripRows, in_copies, rows_of
from ....primitives.strip_sums import copies_of_sums
from ....primitives.tile_scheduler import Sections, TileScheduler
from ....primitives.values import Fixed, choose, permuted
from ..planning.arguments import MainArguments, PiecesArguments
from ..planning.plan_backward import COUNTER, AnyTiling, BackwardPlan
from ..tiles.architecture import Kernel
from ..tiles.tiling import BackwardTiling
from .chain import let_next_begin, overlaps, wait_for_former
from .dq_claims import DqClaims
from .dq_clearing import DqClearing
from .key_tile import KeyTile


class Backward(Kernel, Generic[AnyTiling]):
    """A block keeps a tile of keys and walks over the queries that see it.

    One warp copies K, V once and Q, dO with their rows' statistics. Edges of its block: kv (1 stage), q (Q and LSE),
    do (dO and D; or D comes on q). What the other warps do is the architecture's (`share_roles`); all ask alike for
    their queries.

    For a head group (GQA) the walk goes over the queries of all its heads, so dK and dV are summed without atomics.
    Where tiles are few they are cut into pieces, runs of query tiles, which leave what they have of dK and dV apart, in
    fp32 and in the order of registers; `backward_gather` sums it, in a fixed order too.

    Where shared memory has room a block stays for many tiles (`DynamicScheduler`): the next K, V, Q and dO arrive while
    dK and dV leave.
    """

    arguments = MainArguments
    threads: int  # of a block
    blocks = 1  # on an SM at once
    stored_rows: int  # of dK and dV that leave in one copy
    stored_across = 1  # copies that bring their columns
    arithmetic: Arithmetic = ONE_BY_ONE
    keeps_shared_base = True  # in a register from one end of the kernel to the other, not a constant where it is used
    delta_with_q = False  # whether D comes on the edge of Q and LSE, not of dO

    def __init__(self, plan: BackwardPlan[AnyTiling]):
        self.plan, self.tiling = plan, plan.tiling
        columns = 0 if plan.layout.strips is None else plan.layout.strips.apart
        self.mods = BackwardMods(plan.program, plan.intervals, plan.limits, plan.captured, self.arithmetic, columns)
        self.visited = query_tiles_of(self.mods, plan.lists, plan.tiling.tile_m)

    @abc.abstractmethod
    def layouts(self) -> Any:
        """Layouts of shared memory: q, dout in stages, k, v, and dk, dv that are stored."""

    @abc.abstractmethod
    def block(self, layouts: Any, counter: cute.Tensor) -> Any:
        """Shared memory and edges of a block."""

    @abc.abstractmethod
    def share_roles(self, call: "BackwardCall", block: Any, warp: Int32) -> None:
        """What each warp of a block does; one of them `produce`s."""

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = self.arguments(*arguments), self.tiling
        self.dtype = given.q.element_type
        queries, keys = rows_of(self.plan.layout, given.q, given.k, given.sequences)
        mQ, mdO = [queries.for_copies(t) for t in (given.q, given.dout)]
        mK, mV = [keys.for_copies(t) for t in (given.k, given.v)]
        layouts = self.layouts()
        statistics = statistics_of(given.workspace, COUNTER, given.dq_accum, tiling.tile_m)
        host = HostRows(queries, keys, mQ, mdO, mK, mV)
        tmas, tensors = self.operands(given, host, layouts, statistics)
        group = mQ.shape[2] // mK.shape[2]
        order = self.order(given, mK, group, queries, keys)
        flags = given.workspace, COUNTER, given.dq_accum, tiling.tile_m
        pieces = pieces_of(self.plan.tiling, given.pieces) if self.plan.in_pieces else None
        sharing = self.plan.tiling.sharing
        blocks = numbers = order.tiles if pieces is None else pieces.numbers
        if const_expr(tiling.persistent):
            blocks = cutlass.min(blocks, self.plan.target.sms // sharing)
        self.kernel(
            tmas,
            tensors,
            layouts,
            statistics,
            given.dq_accum,
            given.turns,
            counter_of(given.workspace),
            cleared_of(*flags) if tiling.clears else None,
            claims_of(*flags, tiling.claimed_parts) if tiling.claimed_parts else None,
            (order, pieces, numbers, given.scale, given.captured, given.scalars, queries, keys, group),
        ).launch(
            grid=(blocks * sharing, 1, 1),
            cluster=None if sharing == 1 else (sharing, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            # said where there are several, else the kernel language asks the driver, which compiling must not need
            preferred_smem_carveout=None if self.blocks == 1 else 100,
            use_pdl=overlaps(self.plan.target),
            hint_smem_base_uniform=self.keeps_shared_base,
        )

    def operands(self, given: MainArguments, host: "HostRows", layouts: Any, statistics: cute.Tensor) -> "Operands":
        """How tiles come to shared memory and leave it."""
        tiling = self.tiling
        read, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        row_layout = cute.make_layout((tiling.tile_m,))
        copies = [
            *self.loads(host.q, host.dout, host.k, host.v, layouts, host.queries, host.keys),
            cpasync.make_tiled_tma_atom(read, permuted(statistics, 3, 2, 1, 0), row_layout, (tiling.tile_m,)),
        ]
        results = (given.dk, layouts.dk, tiling.d), (given.dv, layouts.dv, tiling.dv)
        for which, (tensor, layout, width) in enumerate(results):
            box = cute.select(layout, [0, 1])
            part = self.stored_rows, width // self.stored_across
            if self.plan.layout.shares_keys:
                flags = tiling.flags(given.dq_accum.shape[2])
                place = given.workspace, COUNTER, given.dq_accum, tiling.tile_m, flags
                parts = parts_of(host.keys.length, tiling.tile_n)
                written = written_of(*place, parts, host.k.shape[2])[which, None, None, None]
                image, box_of_keys = host.keys.for_copies(tensor), in_copies(host.keys, *part)
                copies.append(copies_of_sums(image, box, box_of_keys, host.keys.before, written))
            else:
                stored = self.stored(host.keys, tensor, part[0])
                copies.append(cpasync.make_tiled_tma_atom(store, stored, box, part))
        across = self.loads_across(host.q, host.dout, host.k)
        dq = (None, None) if given.finished is None else self.finished(host.queries.for_copies(given.finished))
        return (
            BackwardOperands._make([*(c[0] for c in copies), tuple(c[0] for c in across), dq[0]]),
            BackwardOperands._make([*(c[1] for c in copies), tuple(c[1] for c in across), dq[1]]),
        )

    def finished(self, dq: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """The copy by which parts of dQ leave where no sum is left for a postprocess, and dQ as it sees it."""
        raise NotImplementedError(f"{self.tiling.kernel} leaves sums of dQ")

    def part_of_dq(self, m: Any, number: Any) -> tuple[tuple[int, int], Any, Any]:
        """How large the part of group `number` in query tile `m` is, and its number along rows, and along columns."""
        raise NotImplementedError(f"{self.tiling.kernel} leaves sums of dQ")

    def stored(self, keys: Any, tensor: cute.Tensor, box: int) -> cute.Tensor:
        """dK or dV as copies of so many rows see it."""
        if self.plan.has_segments:
            return keys.for_stores(tensor, box)
        return keys.for_copies(tensor)

    def loads(self, mQ: Any, mdO: Any, mK: Any, mV: Any, layouts: Any, queries: Any, keys: Any) -> list:
        """Copies of tiles of Q, dO, K and V."""
        tiling, op, first = self.tiling, cpasync.CopyBulkTensorTileG2SOp(), [0, 1]
        q_box, dout_box = [in_copies(queries, tiling.tile_m, width) for width in (tiling.d, tiling.dv)]
        k_box, v_box = [in_copies(keys, tiling.block_keys, width) for width in (tiling.d, tiling.dv)]
        return [
            bulk_copy(op, mQ, cute.select(layouts.q, first), q_box),
            bulk_copy(op, mdO, cute.select(layouts.dout, first), dout_box),
            bulk_copy(op, mK, layouts.k, k_box),
            bulk_copy(op, mV, layouts.v, v_box),
        ]

    def loads_across(self, mQ: Any, mdO: Any, mK: Any) -> list:
        """Copies of some columns of Q, dO and K, of those whose block has another part of them as a second operand."""
        return []

    def of_block(self, tensors: "BackwardOperands") -> "BackwardOperands":
        """The tensors as a block sees them."""
        return tensors

    def order(self, given: MainArguments, mK: cute.Tensor, group, queries: Any, keys: Any) -> TileScheduler:
        """The order of the tiles of keys: heads whose queries stay in L2 together."""
        tiling, kv_heads = self.plan.tiling, mK.shape[2]
        # of a head, Q and dO are read and dQ is added to by all blocks; these come back from L2
        q_rows = given.q.shape[2] if self.plan.layout.is_dense else given.q.shape[0]
        entries, kv_rows = mK.shape[3], mK.shape[0]
        if isinstance(keys, StripRows):
            q_rows, entries, kv_rows = queries.length, entries * keys.count, keys.length
        if given.key_tiles is not None and self.plan.layout.is_dense:  # a table goes over all sequences of a head
            q_rows = q_rows * (entries if isinstance(keys, StripRows) else given.q.shape[0])
        q_bytes = Int64(q_rows) * group * ((tiling.d + tiling.dv) * self.dtype.width // 8 + 4 * tiling.d)
        # with 24 query heads on 3, sections of one head left 23 % of SMs idle
        tiles = 3 * self.plan.target.sms // 2 // tiling.sharing
        sections = Sections(q_bytes, tiling.l2, tiling.heads_together, tiles, tiling.heads_at_last or None)
        return TileScheduler.of(given.key_tiles, kv_rows, tiling.tile_n, entries, kv_heads, kv_heads, sections)

    @cute.kernel
    def kernel(self, tmas, tensors, layouts, statistics, dq_accum, turns, counter, cleared, claims, work):
        let_next_begin(self.plan.target)  # blocks that round dQ start as the last ones of these end
        clearing = None if cleared is None else DqClearing(dq_accum, cleared, counter)
        claims = None if claims is None else DqClaims(claims)
        call = BackwardCall(tmas, self.of_block(tensors), statistics, dq_accum, clearing, claims, turns, *work)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = self.begun(tmas, layouts, counter, warp)
        if const_expr(call.order.table is None or self.tiling.persistent):
            self.share_roles(call, block, warp)
        else:
            if self.exists(call, self.first_number()):
                self.share_roles(call, block, warp)
            else:  # the postprocess waits for this one alone, which must not end before the one in front
                wait_for_former(self.plan.target)
                self.pass_by(call, self.first_number(), warp == 0)

    @cute.jit
    def begun(self, tmas, layouts, counter, warp):
        """A block that is ready for its roles."""
        if warp == 0:
            for tma in descriptors(tmas.every):
                cpasync.prefetch_descriptor(tma)
        block = self.block(layouts, counter)
        start_edges(block.edges, warp)
        return block

    def work_tile(self, call, number) -> "KeyTile":
        """Keys of work tile `number`: the first ones first, as a causal mask lets most queries see them, or by a table.

        In a fixed order of dQ the last ones first, of each sequence or segment of a table as well: who has one waits
        only for tiles of lower numbers. Where the last section goes backwards, it has the first ones first again, each
        from the last queries on.
        """
        tile_n = self.tiling.tile_n
        piece = None
        if call.pieces is not None:
            number, piece = call.pieces.split(number)
        work = call.order.tile(number)
        queries, keys = [rows.sequence(work.b).within(work.segment) for rows in (call.queries, call.keys)]
        dense = call.order.table is None  # then numbers come from the last to the first, else as the table says
        count = call.order.blocks if dense else (keys.rows + (tile_n - 1)) // tile_n
        n = count - 1 - work.m if dense and not self.plan.deterministic else work.m
        backwards: Boolean | bool = False
        if self.tiling.ends_backwards:
            backwards = call.order.in_last_section(number)
            n = choose(backwards, count - 1 - n, n)
        padded = PaddedTiles.of(queries, work.b, self.tiling.tile_m)
        return KeyTile(n, count, work.b, work.kv_head, queries, keys, padded, piece, backwards)

    def first_number(self):
        """The number of this block's first tile of keys, or part of one."""
        number = cute.arch.block_idx()[0]
        return number if self.plan.tiling.sharing == 1 else number // 2

    def turn(self, call, work, head, m) -> cute.Pointer:
        """Where it is counted how many blocks have added to query tile `m`; each of a pair adds to its own part."""
        place = work.padded.first + m
        if self.plan.tiling.sharing == 2:
            place = 2 * place + rank()
        return call.turns[work.padded.b, head, None].iterator + place

    def exists(self, call, number):
        """Whether a table has the tile of this number, or the one that it is a piece of."""
        if call.order.table is None:
            return True
        return call.order.tile(number if call.pieces is None else call.pieces.split(number)[0]).exists

    @cute.jit
    def is_there(self, call, block, number):
        """Whether it `exists`; a block that draws its first number begins with a negative one."""
        if const_expr(not block.queue.draws_first):
            there = self.exists(call, number)
        else:
            there = number >= 0
            if there:
                there = Boolean(self.exists(call, number))
        return there

    def pass_by(self, call, number, is_mine) -> None:
        """What a table has no tile for, for one warp to say."""
        if call.pieces is not None:
            call.pieces.note_absent(number, is_mine & (cute.arch.lane_idx() == 0))

    def leaves(self, call, work, head, n=None) -> Leaves:
        q_len, kv_len = work.queries.length, work.keys.length
        first = work.keys.from_start((work.n if n is None else n) * self.tiling.tile_n)
        last = cutlass.min(first + self.tiling.tile_n, work.keys.end) - 1
        metadata = None
        if self.plan.metadata is not None:
            # a fixed order has the tiles of a segment in a row, the last one first
            entry = work.keys.segment.entry(before=0 if n is None else n - work.n)
            metadata = KeyTileMetadata(entry, self.plan.metadata)
        read = call.scale, call.captured, call.scalars
        return Leaves(work.b, head, q_len, kv_len, *read, first=first, last=last, metadata=metadata)

    @property
    def cuts_heads(self) -> bool:
        """Whether a piece of a tile of keys is some of the heads of its group, else it is some of its queries."""
        return self.tiling.ends_backwards or self.tiling.heads_a_piece > 0

    def members(self, call, work):
        """[first, stop) of the heads of the group that work visits: all, or a piece of a tile that is cut by heads."""
        if work.piece is None or not self.cuts_heads:
            return 0, call.group
        index, count = work.piece.index, work.piece.count
        return call.group * index // count, call.group * (index + 1) // count

    def query_tiles(self, call, work, head, n=None) -> list[QueryRun] | list[ListedQueryRun]:
        """The query tiles that work, or a whole tile of keys `n`, visits for one head; all roles ask alike."""
        runs = self.visited.of(self.leaves(call, work, head, n), work.n if n is None else n, work.queries)
        if self.tiling.ends_backwards:
            return [dataclasses.replace(run, backwards=work.backwards) for run in runs if isinstance(run, QueryRun)]
        if work.piece is not None and n is None and not self.cuts_heads:
            runs = [run.piece(work.piece.index, work.piece.count, head) for run in runs]
        return runs

    @cute.jit
    def steps(self, call, work):
        """How many query tiles a tile of keys visits, of all heads of its group."""
        count = Int32(0)
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            for run in self.query_tiles(call, work, work.kv_head * call.group + member):
                count = count + run.count
        return count

    # --- walks over tiles ------------------------------------------------------------------------------------

    @cute.jit
    def walk(
        self,
        call,
        block,
        do: cutlass.Constexpr[Callable],
        following: cutlass.Constexpr[Callable],
        slots,
        tells: cutlass.Constexpr[bool] = False,
    ):
        """The tiles of keys of this block, each by `do(call, work, slots)`, which returns the slots it came to.

        Where a block stays, `following(queue, slot, lane)` is the number of its next tile. `tells`: of those that are
        not there.
        """
        number = self.first_number()
        if const_expr(not self.tiling.persistent):
            do(call, self.work_tile(call, number), slots)
        else:
            lane = cute.arch.lane_idx()
            slot = block.queue.edge.first
            if const_expr(block.queue.draws_first):
                # no tile yet. Drawn before the loop, by a second copy of that code, numbers took 5 % more instructions
                # and 3.5 % more time of a neighbourhood's tiles
                number = Int32(-1)
            while number < call.numbers:
                if self.is_there(call, block, number):
                    slots = do(call, self.work_tile(call, number), slots)
                elif const_expr(tells):
                    self.pass_by(call, number, number >= 0 if block.queue.draws_first else Boolean(True))
                number = following(block.queue, slot, lane)
                slot = slot.next()

    @cute.jit
    def produce(self, call, block):
        """The copying warp."""
        edges = block.kv_edge, block.q_edge, block.do_edge
        slots = tuple(e.first for e in edges)
        self.walk(call, block, lambda *work: self.produce_tile(block, *work), draw, slots, tells=True)

    @cute.jit
    def visit(self, call, block, me, steps):
        """A group `me` of those that hold scores; `steps`: the slots that each step takes one further."""
        slots = (block.kv_edge.first, *steps)
        self.walk(call, block, lambda *work: self.visit_tile(block, me, *work), DynamicScheduler.hear, slots)

    @cute.jit
    def visit_tile(self, block, me, call, work, slots):
        """All query tiles of all heads of the group, or of the tile's part of it."""
        tiling = self.tiling
        kv_slot, steps = slots[0], slots[1:]
        me.begin(work)
        ragged = work.is_cut(tiling.tile_n)
        me.wait_for_keys(kv_slot)
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            me.begin_head(self.mods, head, self.leaves(call, work, head))
            for run in self.query_tiles(call, work, head):
                steps = me.begin_run(call, run, steps)
                for i in cutlass.range(run.count, unroll=1):
                    me.step(call, run.tile(i), me.tested(run, i, ragged), *steps)
                    steps = me.following(call, run.tile(i), steps)
        steps = me.end(steps)
        if const_expr(tiling.persistent):
            me.release_keys(kv_slot)
        me.finish(call)
        return kv_slot.next(), *steps

    def load_keys(self, call, block, work, kv_slot):
        """K and V of a block's keys, or K alone where it has more stages."""
        tiling, tmas, tensors = self.tiling, call.tmas, call.tensors
        gK = work.keys.tiles(tensors.k, work.kv_head, (tiling.tile_n, tiling.d))
        tKsK, tKgK = partition(tmas.k, block.sK, gK)
        if tiling.k_stages > 1:
            load(tmas.k, tKgK, work.n, tKsK, block.kv_edge.acquire(kv_slot), kv_slot.index)
            return
        gV = work.keys.tiles(tensors.v, work.kv_head, (tiling.tile_n, tiling.dv))
        tVsV, tVgV = partition(tmas.v, block.sV, gV)
        bar = block.kv_edge.acquire(kv_slot)
        load(tmas.k, tKgK, work.n, tKsK, bar)
        load(tmas.v, tVgV, work.n, tVsV, bar)

    @cute.jit
    def load_values(self, call, block, work, kv_slot, left):
        """V, where K has more stages than V, unless nothing is `left`: for it the tile before has to end, but not for
        the first queries. Gives what is left.
        """
        if left != 0:
            gV = work.keys.tiles(call.tensors.v, work.kv_head, (self.tiling.tile_n, self.tiling.dv))
            tVsV, tVgV = partition(call.tmas.v, block.sV, gV)
            load(call.tmas.v, tVgV, work.n, tVsV, block.v_edge.acquire(block.value_slot(kv_slot)))
            left = Int32(0)
        return left

    @cute.jit
    def produce_tile(self, block, call, work, slots):
        tiling = self.tiling
        kv_slot, q_slot, do_slot = slots
        tmas, tensors = call.tmas, call.tensors
        self.load_keys(call, block, work, kv_slot)
        # for the statistics and the empty sum of dQ: consumers add to it once they have seen statistics
        cute.arch.griddepcontrol_wait()
        values_left = Int32(1)
        begin, stop = self.members(call, work)
        for member in cutlass.range(begin, stop, unroll=1):
            head = work.kv_head * call.group + member
            if const_expr(call.clearing is not None):
                call.clearing.wait(work.padded.b, head)
            gQ = work.queries.tiles(tensors.q, head, (tiling.tile_m, tiling.d))
            gdO = work.queries.tiles(tensors.dout, head, (tiling.tile_m, tiling.dv))
            gLse, gDelta = [
                cute.local_tile(tensors.rows[None, head, work.padded.b, kind], (tiling.tile_m,), (None,))
                for kind in range(2)
            ]
            tQsQ, tQgQ = partition(tmas.q, block.sQ, gQ)
            tdOsdO, tdOgdO = partition(tmas.dout, block.sdO, gdO)
            tLsLse, tLgLse = partition(tmas.rows, block.sLse, gLse, modes=1)
            tDsDelta, tDgDelta = partition(tmas.rows, block.sDelta, gDelta, modes=1)
            for run in self.query_tiles(call, work, head):
                for i in cutlass.range(run.count, unroll=1):
                    m = run.tile(i)
                    padded = work.padded.first + m
                    bar = block.q_edge.acquire(q_slot)
                    load(tmas.q, tQgQ, m, tQsQ, bar, q_slot.index)
                    cute.copy(tmas.rows, tLgLse[None, padded], tLsLse[None, q_slot.index], tma_bar_ptr=bar)
                    if const_expr(self.delta_with_q):
                        cute.copy(tmas.rows, tDgDelta[None, padded], tDsDelta[None, q_slot.index], tma_bar_ptr=bar)
                    q_slot = q_slot.next()
                    bar = block.do_edge.acquire(do_slot)
                    load(tmas.dout, tdOgdO, m, tdOsdO, bar, do_slot.index)
                    if const_expr(not self.delta_with_q):
                        cute.copy(tmas.rows, tDgDelta[None, padded], tDsDelta[None, do_slot.index], tma_bar_ptr=bar)
                    do_slot = do_slot.next()
                    if const_expr(tiling.k_stages > 1):
                        values_left = self.load_values(call, block, work, kv_slot, values_left)
        if const_expr(tiling.k_stages > 1):
            self.load_values(call, block, work, kv_slot, values_left)
        return kv_slot.next(), q_slot, do_slot


class BackwardOperands(NamedTuple):
    """For each tensor that lies in tiles, its TMA copy (None: there is none), or the tensor as that copy sees it."""

    q: Any
    dout: Any
    k: Any
    v: Any
    rows: Any  # row statistics
    dk: Any
    dv: Any
    across: tuple  # see `loads_across`
    dq: Any = None  # where it is finished

    @property
    def every(self) -> tuple:
        return *self[:-2], *self.across, self.dq

    @property
    def results(self) -> tuple[Any, Any]:
        return self.dk, self.dv


Operands = tuple[BackwardOperands, BackwardOperands]
"""Bulk copies of what comes and goes by such, and the tensors as these copies, or the kernel's threads, see them."""


class HostRows(NamedTuple):
    """On the host: where rows of queries and keys lie, and the tensors with a row and its columns as first modes."""

    queries: Any
    keys: Any
    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


@dataclasses.dataclass
class BackwardCall(Fixed):
    """What the kernel was called with; `numbers`: how many pieces of work there are."""

    tmas: BackwardOperands
    tensors: BackwardOperands
    statistics: cute.Tensor
    dq_accum: cute.Tensor
    clearing: DqClearing | None
    claims: DqClaims | None
    turns: cute.Tensor | None
    order: TileScheduler
    pieces: Pieces | None
    numbers: Int32
    scale: Float32
    captured: tuple
    scalars: tuple
    queries: Rows
    keys: Rows
    group: Int32


def draw(queue: DynamicScheduler, slot: Slot, lane: Int32) -> Int32:
    """The number of this block's next tile, for the copying warp, which tells all others."""
    cute.arch.griddepcontrol_wait()  # for the counter
    return queue.hand_out(slot, lane)


def pieces_of(tiling: BackwardTiling, given: PiecesArguments) -> Pieces:
    """The pieces of a launch, on the host."""
    return Pieces.of(given, tiling.tile_n * tiling.d, tiling.tile_n * tiling.dv)
