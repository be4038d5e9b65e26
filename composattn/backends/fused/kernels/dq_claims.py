"""Who comes first at a part of a tile of dQ writes it, in any order, where others add: so nobody clears dQ.

Whoever has a part ready looks, by then mostly in vain, whether nobody was there before. If so it says that it will
write, and again when that is there, for which all others wait. It has what it writes: nobody waits for a block that
waits itself, or has not started.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ....primitives.bulk_sums import wait_sums
from ....primitives.turns import publish_if, read, wait_for
from ....primitives.values import Fixed

NOBODY, CLAIMED, WRITTEN = range(3)


class DqClaims(Fixed):
    """`states`: int32 (B, H, tiles, parts), `NOBODY` when the kernel starts."""

    def __init__(self, states: cute.Tensor):
        self.states = states

    def place(self, entry: Int32, head: Int32, tile: Int32, part: Int32) -> cute.Pointer:
        return self.states[entry, head, tile, None].iterator + part


def look(place: cute.Pointer) -> Int32:
    """What is there now, for the whole warp."""
    return cute.arch.make_warp_uniform(read(place))


@cute.jit
def is_first(place: cute.Pointer, seen: Int32, lane: Int32) -> Int32:
    """Whether this warp is to write, not 0; else what was written is there. `seen`: what was there some time before."""
    first = Int32(0)
    if seen != WRITTEN:
        first = cute.arch.make_warp_uniform(_claim(place, lane == 0))
        if first == 0:
            wait_for(place, WRITTEN)
            cute.arch.sync_warp()
    return first


@cute.jit
def say_written(place: cute.Pointer, first: Int32, lane: Int32):
    """By who is the first, when what it writes is there."""
    if first != 0:
        wait_sums(Boolean(True), read=False)
        cute.arch.sync_warp()
        publish_if(place, Int32(WRITTEN), lane == 0)


@cute.jit
def _claim(place: cute.Pointer, condition: Boolean) -> Int32:
    """Whether nobody was there before, by the lane for which the condition holds: 1, else 0."""
    found = Int32(CLAIMED)
    if condition:
        found = cute.arch.inline_ptx(
            f"atom.acquire.gpu.global.cas.b32 {{$w0}}, [{{$r0}}], {NOBODY}, {CLAIMED};",
            write_only_types=[Int32],
            read_only_args=[place],
        )
    return Int32(found == NOBODY)


__all__ = ["DqClaims", "is_first", "look", "say_written"]
