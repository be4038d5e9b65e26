"""Order in which blocks take work tiles: heads that share K and V near each other, longest tiles first."""

import dataclasses
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .segment_entry import WIDE
from .values import Bundle, Fixed, choose, larger, smaller


@dataclasses.dataclass
class Segment(Fixed):
    """Rows [start, stop) of a sequence, the `number`-th segment of it: tiles begin with it, and none goes on behind.

    `table`: that says so, at its entry `at`, with what else it has of the tile.
    """

    start: Int32
    stop: Int32
    number: Int32
    table: cute.Tensor | None = None
    at: Any = 0

    @staticmethod
    def of(table: cute.Tensor, entry: Int32) -> "Segment | None":
        """That of an entry of a table of work, if the table has such."""
        if table.shape[1] < WIDE:
            return None
        return Segment(table[entry, 2], table[entry, 3], table[entry, 4], table, entry)

    def entry(self, before: Any = 0) -> cute.Tensor:
        """What the table has of the tile, or of the one that is so many entries `before` it."""
        assert self.table is not None, "a table says that this is a segment"
        return self.table[self.at - before, None]


@dataclasses.dataclass
class WorkTile(Fixed):
    """Row block `m` of one query head `h` of one sequence `b`, with the head's key/value head.

    `exists` is False where a table of work ends before its last entry. `segment`: of which the tile is the m-th.
    """

    m: Int32
    b: Int32
    h: Int32
    kv_head: Int32
    exists: Any = True
    segment: Segment | None = None


class Sections(NamedTuple):
    """How many heads a section has: as many as fit in L2, unless a number is given.

    `kv_bytes` is the size of K and V of one key/value head (of all sequences, with a table), of which so many fit in
    `l2` bytes. There are at least as many heads as have `least` work tiles, since the longest tiles of the last section
    start when little is left to run beside them. `together`: how many key/value heads instead. `at_last`: how many the
    last section has, None: as many as the others.
    """

    kv_bytes: Any
    l2: int
    together: int | None = None
    least: int = 0
    at_last: int | None = None


class TileScheduler(Bundle):
    """Numbers work tiles so that the heads of one section, whose K and V fit in L2 together, run together.

    Within a section row blocks run in an order of their own, and for each row block all heads of the section, those of
    one key/value head next to each other. The first section may have fewer heads than the others: at the end it would
    start its longest tiles when nothing is left to run beside them. The last one may have a number of heads of its own.

    Row blocks run from the last to the first (longest first where the visible interval grows with q), each batch entry
    like a head of its own; or as a table says, int32 (entries, 2): the sequence and the row block of each, in order.
    Entries that are too many have sequence -1. In tables of 6 numbers or more an entry has a `Segment` as well.
    """

    def __init__(self, blocks, heads, batch, kv_heads, sections: Sections, table=None) -> None:
        """On the host; `blocks`: of a head, or entries of the table."""
        divisor = cute.fast_divmod_create_divisor_v2
        self.blocks = Int32(blocks)
        total = Int32(heads * batch)
        group = heads // kv_heads
        most = smaller(self._most(sections, group) * group, total)
        rest, last = total, None
        if sections.at_last is not None:
            last = smaller(Int32(sections.at_last) * group, total)
            self.before_last = total - last
            rest = larger(self.before_last, Int32(1))  # of none there is no section
        count = Int32(cute.ceil_div(rest, most))
        section = smaller(Int32(cute.ceil_div(cute.ceil_div(rest, count), group)) * group, most)
        short = rest - (Int32(cute.ceil_div(rest, section)) - 1) * section
        self.tiles = self.blocks * total
        self.tiles_in_section = divisor(self.blocks * section)
        self.section = divisor(section)
        self.first_section = divisor(short)
        self.heads = divisor(Int32(heads))
        self.group = divisor(Int32(group))
        self.table = table
        self.last_section = None if last is None else divisor(last)
        given = ("table",) if table is not None else ()
        if self.last_section is not None:
            given = (*given, "last_section", "before_last")
        self.parts = ("tiles", "tiles_in_section", "blocks", "section", "first_section", "heads", "group", *given)

    def _most(self, sections: Sections, group):
        """Key/value heads of a section, at most."""
        if sections.together is not None:
            return Int32(sections.together)
        kv_bytes = larger(Int64(sections.kv_bytes), Int64(1))
        fitting = Int32(smaller(Int64(sections.l2) // kv_bytes, Int64(1 << 16)))
        busy = Int32(cute.ceil_div(sections.least, self.blocks * group))
        return larger(fitting, larger(busy, Int32(1)))

    @staticmethod
    def of(
        table: cute.Tensor | None, q_len, tile_m: int, batch, heads, kv_heads, sections: Sections
    ) -> "TileScheduler":
        """Row blocks in the order of a table, or, with none, of equally long sequences, from the last to the first."""
        blocks, batch = (cute.ceil_div(q_len, tile_m), batch) if table is None else (table.shape[0], 1)
        return TileScheduler(blocks, heads, batch, kv_heads, sections, table)

    def in_last_section(self, number: Int32) -> Boolean:
        """Whether this number's work tile is of the last section, and that is not the only one."""
        if self.last_section is None:
            before = self.tiles - self.tiles_in_section.divisor
        else:
            before = self.before_last * self.blocks
        return (before > 0) & (number >= before)

    def tile(self, number: Int32) -> WorkTile:
        """The work tile with this number, 0 <= number < tiles."""
        # as if the first section were as large as the others, and its numbers the last ones of it
        lacking = self.section.divisor - self.first_section.divisor
        section, within = divmod(number + lacking * self.blocks, self.tiles_in_section)
        at_full, head_full = divmod(within, self.section)
        at_first, head_first = divmod(number, self.first_section)
        first = section == 0
        at = choose(first, at_first, at_full)
        head = choose(first, head_first, section * self.section.divisor - lacking + head_full)
        if self.last_section is not None:
            behind = number - self.before_last * self.blocks
            at_last, head_last = divmod(larger(behind, Int32(0)), self.last_section)
            at = choose(behind >= 0, at_last, at)
            head = choose(behind >= 0, self.before_last + head_last, head)
        if self.table is not None:
            kv_head, _ = divmod(head, self.group)
            b, m = self.table[at, 0], self.table[at, 1]
            return WorkTile(m, b, Int32(head), Int32(kv_head), b >= 0, Segment.of(self.table, at))
        b, h = divmod(head, self.heads)
        kv_head, _ = divmod(h, self.group)
        return WorkTile(Int32(self.blocks - 1 - at), Int32(b), Int32(h), Int32(kv_head))
