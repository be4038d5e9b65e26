"""What a Hopper backward kernel is cut into: tiles, stages, registers; `backward_choice` says which a call gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from ..fused.planning.tables import first, tables_of
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import BackwardTiling
from ..fused.tiles.written import Written
from .tiling import ROWS, Registers

FILE = Path(__file__).with_name("backward.json")
TABLES = tables_of(FILE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBackwardTiling(BackwardTiling):
    """A warpgroup has 64 keys with their dK and dV in registers, or (`shared_keys`) one has dV and one dK of all keys.

    Q lies in a ring of `q_stages`, dO in one of `do_stages`, dS in `ds_stages` buffers: of dO one where a second one
    does not fit. `dq_leaves`: dQ of a query tile is computed and added from registers "at once", or a tile "later", so
    that no warpgroup waits for another's dS; or then "in bulk", through shared memory, by copies that add, one warp
    starting them for each warpgroup, and where blocks stay dK and dV leave through the same place. `k_stages`: with a
    second one the next K comes while this one is read, dK leaves through its place, and V comes before a tile ends.
    `tries_first`: see `Edge`. `bends_early`: where the derivative of a score looks at the score, P too is computed
    while dPᵀ runs, with what dP - D is multiplied by, and a tanh near 0 is a polynomial. `resident`: so many
    columns of a warpgroup's V, and behind them of K, wait in registers for all query tiles, so that the tensor core
    reads only the others from shared memory. `distances`: numbers in shared memory of their own through which sums
    of gradients by distance pass. `written`: how products are, see `fused/tiles/written.py`.
    """

    l2: ClassVar[int] = 16 << 20
    warpgroups: ClassVar[int] = 2
    q_stages: ClassVar[int] = 2
    ds_stages: ClassVar[int] = 2
    dk_parts: ClassVar[int] = 1  # blocks that have columns of dK and dV side by side

    k_stages: int = 1
    do_stages: int = 2
    dq_leaves: Literal["at once", "later", "in bulk"] = "at once"
    tries_first: bool = False
    bends_early: bool = True
    resident: int = 0
    distances: int = 0
    written: Written = "by steps"  # `backward_pair` loses 4 % by whole ones

    def __post_init__(self) -> None:
        """Raises `AssertionError` for what leaves dQ unwritten, or blocks that wait for each other in a circle."""
        # reductions from registers add to what nobody cleared
        assert self.dq_in_bulk or not self.first_writes, "the first at dQ writes it: only copies from shared memory do"

    @property
    def dq_later(self) -> bool:
        """Whether dQ of a query tile is computed a tile later."""
        return self.dq_leaves != "at once"

    @property
    def dq_in_bulk(self) -> bool:
        """Whether copies add it."""
        return self.dq_leaves == "in bulk"

    @property
    def dq_split(self) -> Literal["columns", "rows", "transposed"]:
        """How warpgroups share dQ of a tile: 64 rows each, columns, or, of no whole 64 rows, rows of dQᵀ."""
        if self.tile_m % ROWS:
            return "transposed"
        return "rows" if self.tile_m == ROWS * self.warpgroups else "columns"

    @property
    def resident_v(self) -> int:
        """Columns of V that wait in registers."""
        return min(self.resident, self.dv)

    @property
    def resident_k(self) -> int:
        """Columns of K in registers, taken after all of V."""
        return self.resident - self.resident_v

    @property
    def registers(self) -> Registers:
        """Registers of a thread that computes, and of one that copies, or neither computes nor has dQ."""
        return Registers(*first(TABLES["registers"], self))

    @property
    def in_segments(self) -> bool:
        whole = self.ends_backwards or self.dq_begins in ("claim", "only")
        return self.kernel == "backward" and self.d == self.dv and not whole

    @property
    def shared_keys(self) -> bool:
        return self.kernel in ("backward_wide", "backward_exchange")

    @property
    def dq_apart(self) -> bool:
        """Whether a warpgroup of its own computes dQ, `part_columns` at a time."""
        return self.kernel == "backward_exchange"

    @property
    def results_apart(self) -> bool:
        """Whether dK and dV leave through shared memory of their own, while the next K and V come."""
        return self.persistent and not (self.dq_in_bulk or self.shared_keys)

    @property
    def part_columns(self) -> int:
        """Columns of dQ that a warpgroup of its own computes at a time: whole swizzled rows, 16 and more.

        Two parts of 48 are 7 % faster than one at 192/128, 6 to 8 at D 192: one is added under the other's product.
        """
        return self.d // 4 if self.d % 64 == 0 else self.d // 2

    @property
    def dv_later(self) -> bool:
        """Whether the product for dV of a query tile starts behind that for the next one's scores.

        2 to 4 % of pairs that exchange dS; with one stage dO would stay for too long (D 256 loses 2).
        """
        return self.dq_apart and self.do_stages == 2

    @property
    def dq_parts(self) -> int:
        """Parts of a tile of dQ: one for each warpgroup of all its blocks, or those that one computes in turn."""
        return self.d // self.part_columns if self.dq_apart else self.warpgroups * self.sharing

    @property
    def statistic_stride(self) -> int:
        """From a query tile's row statistics to the next one's, in fp32: tensor copies take addresses of 128 bytes."""
        return -(-self.tile_m // 32) * 32

    @property
    def shared_memory(self) -> int:
        stationary = self.tile_n * (self.k_stages * self.d + self.dv)
        moving = self.tile_m * (self.q_stages * self.d + self.do_stages * self.dv + self.ds_stages * self.tile_n)
        # barriers and row statistics, in front of tiles that begin at whole 1024 bytes
        rows = self.statistic_stride * (self.q_stages + (self.do_stages, self.q_stages)[self.shared_keys])
        front = -(-(512 + 4 * rows) // 1024) * 1024
        numbers = self.tile_m * self.tile_n * self.shared_keys + self.tile_m * self.d * self.dq_in_bulk + self.distances
        return 2 * (stationary * (1 + self.results_apart) + moving) + 4 * numbers + front

    def fits(self, target: Target) -> bool:
        """Where blocks stay dK and dV leave through dQ's place in bulk, which must have room for them."""
        leaves = ROWS * max(self.d, self.dv) * (self.persistent and self.dq_in_bulk)
        return self.tile_m * self.d >= leaves and super().fits(target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperPairBackwardTiling(HopperBackwardTiling):
    """Two blocks have the same keys, each half of the columns of Q, K, V, dO and of what is summed (`of_block`)."""

    kernel: str = "backward_pair"
    sharing: ClassVar[int] = 2
    dk_parts: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        return HopperBackwardTiling(**vars(self) | {"kernel": "backward_wide", "d": self.d // 2, "dv": self.dv // 2})

    @property
    def shared_memory(self) -> int:
        return self.of_block.shared_memory + 4 * self.warpgroups * self.tile_m * self.tile_n


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBackwardTiling(HopperBackwardTiling):
    """Two blocks have half of a tile's keys each (`of_block`), and half of the columns of dQ, from the keys of both."""

    kernel: str = "backward_exchange"
    sharing: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        return HopperBackwardTiling(**vars(self) | {"tile_n": self.block_keys})

    @property
    def shared_memory(self) -> int:
        across = 2 * self.block_keys * (self.d // 2 + self.ds_stages * self.tile_m)
        return across + self.of_block.shared_memory
