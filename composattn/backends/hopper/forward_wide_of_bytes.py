"""The Hopper forward for D or Dv above 256 whose K and V come as bytes: products whose left operand these are.

A product's left operand may come from registers, so that who multiplies makes 16 bits of bytes there, and no 16-bit
tile of K or V ever lies in shared memory: Sᵀ = K Qᵀ, and Oᵀ = Vᵀ Pᵀ. Between these scores have their rows as anywhere.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8, const_expr

from ...primitives.branches import store_if, when
from ...primitives.dequantise import Widening
from ...primitives.lanes import LANES
from ...primitives.matrix_loads import load_matrices
from ...primitives.online_softmax import any_rescales, rescale_rows, rescale_rows_if_needed
from ...primitives.swizzled_tiles import at_column, get_words, put_words, tile_layout
from ...primitives.values import Fixed, smaller
from .forward_wide import HopperForwardWide, HopperWideBlock, SharedRows, WideConsumer
from .scaled_queries import in_fp16, numbers_of, power_of, times_scales
from .turning import Lines
from .wgmma import MN, ROWS, STEP, WARPGROUP, WarpgroupProducts, fragment_shape, issue_all, product, row_column_view
from .wide_tiling import GROUPS, SLICE, STAGE, WideByteTiling

PAIR = 2 * STEP  # bytes: two steps of a product's sum, which four matrices of a load have


class HopperForwardWideOfBytes(HopperForwardWide):
    """`HopperForwardWide` whose warpgroups read bytes.

    Timeline of warpgroup w, for each kv tile, products in steps, see `in_steps`:

        Swᵀ = Kw Qᵀ | turned | maxima, meet, the other's maxima | softmax, Pw to shared memory, meet | Owᵀ += Vwᵀ Pᵀ
    """

    tiling: WideByteTiling

    def block(self, call):
        return HopperWideByteBlock(self)

    @property
    def multiplied(self):
        """The type of all that is multiplied."""
        return Float16 if self.tiling.scales_queries else self.dtype

    def products(self, block, number):
        return TurnedProducts(self.tiling, block, number, self.fragment.rows, self.mods.changes_scores)

    def consumer(self, block, thread, scale_log2):
        return ByteConsumer(self, block, thread, scale_log2)

    def rows_of(self, me, work, leaves):
        return TurnedRows(me, self.mods, work, leaves)

    def key_layout(self, rows, columns):
        return tile_layout(rows, columns, element_bytes=1)


class HopperWideByteBlock(HopperWideBlock):
    """A block's shared memory with slices of bytes, and room to turn what products leave."""

    number_bytes = 1

    def __init__(self, kernel):
        self.key_types, self.copied = kernel.key_types, kernel.dtype
        super().__init__(kernel.tiling, kernel.multiplied, kernel.out_dtype)

    @property
    def copied_queries(self):
        return self.sQ if self.copied is self.dtype else cute.recast_tensor(self.sQ, self.copied)

    def slices(self, smem):
        tiling = self.tiling
        self.bytes_start = smem.allocate_array(Uint8, GROUPS * tiling.stages * STAGE, byte_alignment=1024)
        boxes = tiling.key_box, tiling.value_box
        layouts = [tile_layout(rows, columns, element_bytes=1) for rows, columns in boxes]
        self.value_layout = layouts[1]
        return tuple(self.ring_at(self.bytes_start, *of) for of in zip(layouts, self.key_types, strict=True))

    def more_memory(self, smem):
        rows = self.tiling.rows
        # a row's 64 numbers are 256 bytes: `Turning` changes bits of places in a row
        self.turned = smem.allocate_array(Float32, GROUPS * rows * ROWS, byte_alignment=4 * ROWS)
        self.sFactors = smem.allocate_tensor(Float32, cute.make_layout((ROWS, GROUPS)), 128)


class TurnedProducts(WarpgroupProducts):
    """Sᵀ = K Qᵀ of 64 keys, and Oᵀ += Vᵀ Pᵀ of all of a warpgroup's columns, 64 at a time: issued, not waited for.

    What they leave is (keys or columns, rows of the tile). `qk` and `pv` say how those lie who have rows first.
    """

    def __init__(self, tiling, block, number, fragment_rows, seen):
        # what scores of a thread's rows are multiplied by, see `ScaledProducts`; here where mods see them
        self.scales = cute.make_rmem_tensor(fragment_rows, Float32)
        self.scales.fill(1.0)
        self.row_scales = self.scales if tiling.scales_queries and not seen else None
        self.multiplies = tiling.scales_queries and seen
        keys, columns, rows = tiling.key_box[0], tiling.output_columns, tiling.rows
        self.qk, self.pv = product(block.dtype, keys), product(block.dtype, columns, right=MN)
        self.turned = product(block.dtype, rows, left_in_registers=True, written="whole")
        # descriptors are the same for all threads of a warpgroup: thread 0's view serves
        turned = self.turned.get_slice(0)
        self.right = {
            SLICE: turned.make_fragment_B(turned.partition_B(cute.local_tile(block.sQ, (rows, SLICE), (0, None)))),
            STEP: turned.make_fragment_B(turned.partition_B(cute.local_tile(block.sP, (rows, STEP), (0, None)))),
        }
        self.scores_shape = self.qk.get_slice(0).partition_shape_C((ROWS, keys))
        self.output_shape = self.pv.get_slice(0).partition_shape_C((ROWS, columns))
        self.turned_shape = turned.partition_shape_C((ROWS, rows))
        self.sums, self.blocks = rows // 2, columns // ROWS  # registers of a block of 64 columns of the output
        self.ring = block.ring(number)

    def probabilities(self) -> None:
        """They lie in shared memory."""

    def remembered(self, sums):
        scores = super().remembered(sums)
        return times_scales(scores, self.scales, cute.size(sums)) if self.multiplies else scores

    def left(self, summed: int) -> cute.Tensor:
        """Registers for 64 rows of so many numbers."""
        turned = self.turned.get_slice(0)
        return turned.make_fragment_A(turned.partition_shape_A((ROWS, summed)))

    def block_of(self, sums, number) -> cute.Tensor:
        """Registers of a block of columns among those of all."""
        return cute.make_tensor(sums.iterator + number * self.sums, cute.make_layout(self.turned_shape))

    def issue_scores(self, sums, keys, j) -> None:
        issue_all(self.turned, [(sums, keys, self.right[SLICE][None, None, None, j])], j > 0)

    def issue_output(self, sums, values, i, accumulate) -> None:
        """`values`: of each block of columns, of the `i`-th 16 keys of a tile."""
        right = self.right[STEP][None, None, None, i]
        blocks = ((self.block_of(sums, n), left, right) for n, left in enumerate(values))
        issue_all(self.turned, blocks, accumulate)


class ByteConsumer(WideConsumer):
    """A warpgroup that reads bytes, a warp those of 16 rows of its products."""

    def __init__(self, kernel, block, thread, scale_log2):
        super().__init__(kernel, block, thread, scale_log2)
        tiling = self.tiling
        of_k, of_v = block.key_types
        self.widened = Widening(of_k, block.dtype), Widening(of_v, block.dtype, turned=True)
        warp, matrix, row = self.thread // 32, self.lane // 8, self.lane % 8
        ring = block.bytes_start.toint() + self.number * (tiling.stages * STAGE)
        below = matrix % 2 * 8 + row
        keys = Lines(*tiling.key_box)
        self.first_keys = ring + keys.start_of(warp * 16 + below, matrix // 2)
        # of V the rows are keys; a load has 16 columns of two blocks of 64, which lie in one block of memory or in two
        self.value_lines = values = Lines(*tiling.value_box)
        apart = matrix // 2
        if values.wide == ROWS:
            self.first_values = ring + apart * values.block + values.start_of(below, warp)
        else:
            self.first_values = ring + values.start_of(below, apart * (ROWS // 16) + warp)
        turned = block.turned.toint() + self.number * (4 * tiling.rows * ROWS)
        self.turning = Turning(turned, tiling.rows, warp, self.lane)

    def slice_of_values(self, slot):
        block = self.block
        ring = block.ring_at(block.bytes_start, block.value_layout, Uint8)
        return block.of_group(ring, self.number)[None, None, slot.index]

    @cute.jit
    def prepare_queries(self):
        """Pairs of numbers of each 16 in the order in which a thread has those of a key: 0 2 4 6 1 3 5 7."""
        tiling, rows = self.tiling, self.tiling.rows
        start = self.block.sQ.iterator.toint()
        first = self.number * WARPGROUP + self.thread
        if const_expr(tiling.scales_queries):
            for row in cutlass.range(first // LANES, rows, GROUPS * WARPGROUP // LANES, unroll=1):
                store_if(self.lane == 0, self.block.sFactors, (row, 0), self.scaled(start, row))
        else:
            for i in cutlass.range(first, rows * (tiling.d // STEP), GROUPS * WARPGROUP, unroll=1):
                place = start + at_column(i % rows, i // rows * STEP, ROWS, tiling.d)
                self.put_parted(place, [get_words(place), get_words(place ^ 16)])
        cute.arch.fence_view_async_shared()  # products read what these wrote
        self.sync_consumers()
        if const_expr(tiling.scales_queries):
            self.read_scales()

    def read_scales(self) -> None:
        """Those of this thread's rows; behind a meeting, and before one that others write a factor behind."""
        for r, below in enumerate(fragment_shape(8).row_offsets):  # rows of the tile, not queries
            self.products.scales[r] = self.block.sFactors[(self.row + below) % self.tiling.rows, 0]

    def scaled(self, start, row):
        """A row to fp16, by a warp, with its pairs in that order; gives what its scores are multiplied by."""
        pieces = self.tiling.d // STEP
        places = []
        for first in range(0, pieces, LANES):
            piece = smaller(first + self.lane, pieces - 1)  # some lanes have the last one together
            places.append(start + at_column(row, piece * STEP, ROWS, self.tiling.d))
        numbers = [[numbers_of(get_words(place ^ 16 * half)) for half in range(2)] for place in places]
        factor, scale = power_of([x for piece in numbers for half in piece for x in half], (1, 2, 4, 8, 16))
        cute.arch.sync_warp()
        for place, piece in zip(places, numbers, strict=True):
            self.put_parted(place, [in_fp16(half, factor) for half in piece])
        return scale

    def put_parted(self, place, words) -> None:
        """Pairs of 16 numbers."""
        for half in range(2):
            some = cute.make_rmem_tensor(4, Int32)
            for n in range(4):
                some[n] = words[n // 2][2 * (n % 2) + half]
            put_words(place ^ 16 * half, some)

    def keys_of(self, slot) -> list:
        """Words of a slice of K: of each step those of the rows r and r + 8, then the same of the columns behind."""
        start = self.first_keys + slot.index * STAGE
        return [word for n in range(SLICE // PAIR) for word in load_matrices(start ^ n * PAIR)]

    def values_of(self, slot, step) -> list:
        """Words of 16 keys of a slice of V, of each block of columns two: of the keys up to the eighth, and behind."""
        lines, found = self.value_lines, []
        start = self.first_values + slot.index * STAGE + step * (STEP * lines.wide)
        of_blocks = self.tiling.value_box[0] * ROWS
        for n in range(0, self.products.blocks, 2):
            count = min(4, 2 * (self.products.blocks - n))
            found += load_matrices(start + n * of_blocks, count, turned=True)
        return found

    def as_left(self, words, which: int) -> cute.Tensor:
        """Words of K (0) or V (1) as 16-bit registers of a left operand, which has four of each two of them."""
        left = self.products.left(8 * len(words))
        registers = cute.recast_tensor(left, Int32)
        for n, word in enumerate(words):
            step, inside = divmod(n, 2)
            # of K a word has numbers of both halves of a step in one row, of V those of two rows in one half
            first, apart = (inside, 2) if which == 0 else (2 * inside, 1)
            for half, made in enumerate(self.widened[which](word)):
                registers[4 * step + first + half * apart] = made
        return left


class Turning(Fixed):
    """Turns 64 numbers of each row, as products leave them, through shared memory of a warpgroup's own.

    Number n of a row lies at n ^ f: so that neither the lanes of a store nor those of a load meet in a bank, f has two
    bits, 8 and 16, of the row's three lowest ones.
    """

    def __init__(self, start, rows, warp, lane):
        self.start, self.rows, self.warp, self.lane = start, rows, warp, lane

    def put(self, sums: cute.Tensor, together: bool) -> None:
        """A product's registers; `together`: its rows r and r + 8 are neighbours."""
        quad, group = self.lane % 4, self.lane // 4
        number, behind = (2 * group, 1) if together else (group, 8)
        view = row_column_view(sums)
        for i in range(2):
            row = 2 * quad + i
            place = self.start + row * (4 * ROWS) + ((self.warp * 16 + number) ^ self.flips(row)) * 4
            for r in range(2):
                at = place ^ r * behind * 4
                for c in range(cute.size(view, mode=[1]) // 2):
                    numbers_at(at + c * (8 * 4 * ROWS), 1)[0] = view[r, 2 * c + i]

    def get(self, registers: cute.Tensor) -> None:
        """To registers of a product whose rows these are; rows behind the last one have numbers of others."""
        quad, group = self.lane % 4, self.lane // 4
        view = row_column_view(registers)
        place = self.start + ((2 * quad) ^ self.flips(group)) * 4
        for r in range(2):
            row = (self.warp * 16 + r * 8 + group) % self.rows
            for c in range(cute.size(view, mode=[1]) // 2):
                two = cute.make_rmem_tensor(2, Float32)
                cute.autovec_copy(numbers_at((place ^ c * 32) + row * (4 * ROWS), 2), two)
                view[r, 2 * c], view[r, 2 * c + 1] = two[0], two[1]

    @staticmethod
    def flips(row):
        return row // 2 % 2 * 8 + (row + row // 4) % 2 * 16


def numbers_at(address, count: int) -> cute.Tensor:
    """So many numbers of shared memory."""
    place = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(place, cute.make_layout(count))


class TurnedRows(SharedRows):
    """`SharedRows` whose output is summed turned, and turned back where the last tile is."""

    def __init__(self, me, mods, work, leaves):
        super().__init__(me, mods, work, leaves)
        count = self.products.sums * self.products.blocks
        self.sums = cute.make_rmem_tensor(count, Float32)

    def turn(self, sums, registers, together) -> None:
        turning = self.me.turning
        turning.put(sums, together)
        self.me.sync_group()
        turning.get(registers)

    def scores(self, n, slot):
        ahead = self.mods.read_ahead(self.tile(None, n))
        me, products = self.me, self.products
        turned = cute.make_rmem_tensor(products.turned_shape, Float32)

        def read(j, at):
            me.ring.wait(at)
            words = me.keys_of(at)
            return words, self.leave(at)

        def multiply(j, left):
            products.issue_scores(turned, left, j)

        slot = self.in_steps(self.tiling.d // SLICE, read, lambda words: me.as_left(words, 0), multiply, slot)
        tSrS = cute.make_rmem_tensor(products.scores_shape, Float32)
        self.turn(turned, tSrS, together=False)
        return tSrS, ahead, slot

    def leave(self, slot):
        """Gives a stage back that this warp has read; gives the next one."""
        cute.arch.sync_warp()
        self.me.ring.release(slot, self.me.lane)
        return slot.next()

    def add_output(self, slot, first=None):
        me, products, size = self.me, self.products, self.tiling.value_box[0]
        steps = size // STEP
        if first is None:
            self.rescale_sums()

        def read(i, at):
            if i % steps == 0:
                me.ring.wait(at)
                if first is not None and me.plan.layout.kv == "paged":
                    me.clear_values(self.work.keys.length - (first * self.tiling.tile_n + i * STEP), size, at)
            words = me.values_of(at, i % steps)
            return words, self.leave(at) if i % steps == steps - 1 else at

        def widen(words):
            return [me.as_left(words[n : n + 2], 1) for n in range(0, len(words), 2)]

        def multiply(i, values):
            products.issue_output(self.sums, values, i, first is None or i > 0)

        return self.in_steps(self.tiling.tile_n // STEP, read, widen, multiply, slot)

    def in_steps(self, count, read, widen, multiply, slot):
        """A product of `count` steps; gives where the ring is behind them.

        Words are read under the two steps before the one that they are for, and made 16 bits under one. Read when that
        one had begun, they took 64 heads 5 % more time, and 128 heads 10 %.
        """
        words, slot = read(0, slot)
        left = widen(words)
        if count > 1:
            words, slot = read(1, slot)
        for i in range(count):
            multiply(i, left)
            self.products.wait(1)
            if i + 1 < count:
                left = widen(words)
            if i + 2 < count:
                words, slot = read(i + 2, slot)
        self.products.wait(0)
        return slot

    def rescale_output(self) -> None:
        """Tells all threads that have sums of these rows by what they are multiplied."""
        me, threshold, factors = self.me, self.tiling.threshold, self.block.sFactors
        first = me.shape.first_in_row(me.lane)
        for r, row in enumerate(self.tile_rows):
            store_if(first, factors, (row, me.number), self.rescale[r])
        if threshold.most and threshold.sums_read == "rescaled":
            when(any_rescales(self.rescale), self.note_sums)

    def rescale_sums(self) -> None:
        """Behind the meeting that `rescale_output` comes before."""
        me, count = self.me, self.products.sums // 2
        factors = cute.make_rmem_tensor(count, Float32)
        for c in range(count):
            factors[c] = self.block.sFactors[me.lane % 4 * 2 + (c // 2 * 8 + c % 2), me.number]
        # (row, column) of the sums: pairs of rows each 8, and two columns in each block
        places = (2, count // 2), (2, self.products.blocks)
        sums = cute.make_tensor(self.sums.iterator, cute.make_layout(places, stride=((1, 4), (2, 2 * count))))
        if self.tiling.threshold.most:
            rescale_rows_if_needed(sums, factors)
        else:
            rescale_rows(sums, factors)

    def store(self, call):
        """Behind a meeting of those who have read what was turned before."""
        products, columns = self.products, cute.size(self.output, mode=[1]) // self.products.blocks
        for n in range(products.blocks):
            if n > 0:
                self.me.sync_group()
            registers = cute.make_rmem_tensor(2 * columns, Float32)
            self.turn(products.block_of(self.sums, n), registers, together=True)
            for c in range(2 * columns):
                self.tOrO[n * 2 * columns + c] = registers[c]
        return super().store(call)


__all__ = ["HopperForwardWideOfBytes"]
