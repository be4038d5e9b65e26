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
    """

    parts = ("tiles", "tiles_in_section", "blocks", "section", "last_section", "sections", "heads", "group")

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
        # of even size: a short last section would start its longest tiles when nothing is left beside them
        sections = Int32(cute.ceil_div(total, most))
        section = smaller(Int32(cute.ceil_div(cute.ceil_div(total, sections), group)) * group, most)
        order.sections = Int32(cute.ceil_div(total, section))
        order.tiles = order.blocks * total
        order.tiles_in_section = divisor(order.blocks * section)
        order.section = divisor(section)
        order.last_section = divisor(total - (order.sections - 1) * section)
        order.heads = divisor(Int32(heads))
        order.group = divisor(Int32(group))
        return order

    def tile(self, number: Int32) -> WorkTile:
        """The work tile with this number, 0 <= number < tiles."""
        section, within = divmod(number, self.tiles_in_section)
        m_full, head_full = divmod(within, self.section)
        m_last, head_last = divmod(within, self.last_section)
        last = section == self.sections - 1
        m = self.blocks - 1 - choose(last, m_last, m_full)
        head = section * self.section.divisor + choose(last, head_last, head_full)
        b, h = divmod(head, self.heads)
        kv_head, _ = divmod(h, self.group)
        return WorkTile(m, b, h, kv_head)
