"""Order in which blocks take work tiles: heads that share K and V near each other, longest tiles first."""

import dataclasses

import cutlass.cute as cute
from cutlass import Int32, Int64

from .values import Bundle, Fixed, choose, larger, smaller


@dataclasses.dataclass
class WorkTile(Fixed):
    """Row block `m` of one query head `h` of one batch entry `b`, with the head's key/value head."""

    m: Int32
    b: Int32
    h: Int32
    kv_head: Int32


class WorkOrder(Bundle):
    """Numbers work tiles so that the heads of one section, whose K and V fit in L2 together, run together.

    Within a section row blocks run from the last to the first (longest first where the visible interval grows
    with q), and for each row block all heads of the section, those of one key/value head next to each other.
    The first section may have fewer heads than the others: at the end it would start its longest tiles when
    nothing is left to run beside them.
    """

    parts = ("tiles", "tiles_in_section", "blocks", "section", "first_section", "heads", "group")

    @staticmethod
    def of(q_len, tile_m: int, batch, heads, kv_heads, kv_bytes, l2: int) -> "WorkOrder":
        """On the host; `kv_bytes` is the size of K and V of one key/value head."""
        divisor = cute.fast_divmod_create_divisor_v2
        order = WorkOrder()
        order.blocks = Int32(cute.ceil_div(q_len, tile_m))
        total = Int32(heads * batch)
        fitting = Int32(smaller(Int64(l2) // larger(Int64(kv_bytes), Int64(1)), Int64(1 << 16)))
        group = heads // kv_heads
        most = smaller(larger(fitting, Int32(1)) * group, total)
        sections = Int32(cute.ceil_div(total, most))
        section = smaller(Int32(cute.ceil_div(cute.ceil_div(total, sections), group)) * group, most)
        short = total - (Int32(cute.ceil_div(total, section)) - 1) * section
        order.tiles = order.blocks * total
        order.tiles_in_section = divisor(order.blocks * section)
        order.section = divisor(section)
        order.first_section = divisor(short)
        order.heads = divisor(Int32(heads))
        order.group = divisor(Int32(group))
        return order

    def tile(self, number: Int32) -> WorkTile:
        """The work tile with this number, 0 <= number < tiles."""
        # as if the first section were as large as the others, and its numbers the last ones of it
        lacking = self.section.divisor - self.first_section.divisor
        section, within = divmod(number + lacking * self.blocks, self.tiles_in_section)
        m_full, head_full = divmod(within, self.section)
        m_first, head_first = divmod(number, self.first_section)
        first = section == 0
        m = self.blocks - 1 - choose(first, m_first, m_full)
        head = choose(first, head_first, section * self.section.divisor - lacking + head_full)
        b, h = divmod(head, self.heads)
        kv_head, _ = divmod(h, self.group)
        return WorkTile(Int32(m), Int32(b), Int32(h), Int32(kv_head))
