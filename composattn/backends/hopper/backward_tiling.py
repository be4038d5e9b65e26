"""What a Hopper backward kernel is cut into: tiles, stages, registers; `backward_choice` says which a call gets."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from ..fused.tiles.tiling import BackwardTiling
from ..fused.tiles.written import Written

ROWS = 64  # of one warpgroup's product


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBackwardTiling(BackwardTiling):
    """A warpgroup has 64 keys with their dK and dV in registers, or (`shared_keys`) one has dV and one dK of all keys.

    Q lies in a ring of `q_stages`, dO in one of `do_stages`, dS in `ds_stages` buffers: of dO one where a second one
    does not fit. `dq_split` says how the
    warpgroups share dQ of a tile: by columns, by rows, or transposed (rows of dQᵀ).
    `bends_early`: where the derivative of a score looks at the score, P too is computed while dPᵀ runs, with what
    dP - D is multiplied by, and a tanh near 0 is a polynomial. `dq_later`: dQ of a query tile is computed a tile later,
    so that no warpgroup waits for another's dS. `dq_in_bulk`, then: dQ leaves through shared memory, by copies that
    add, one warp starting them for each warpgroup, and where blocks stay dK and dV leave through the same place; else
    by reductions from registers. `lse_ahead`: rows of LSE that are read under their scores, as many as there are
    registers for. `dv_later`, of pairs that exchange dS: the product for dV of a query tile starts behind that for the
    next one's scores.
    `passing`, then too: a warpgroup passes by query tiles that see none of its keys. `tries_first`: see
    `Edge`.
    `held_k`, `held_v`: so many columns of a warpgroup's K and V wait in registers for all query tiles, so that the
    matrix unit reads only the others from shared memory.
    `part_columns`: of dQ, that a warpgroup of its own computes at a time; 0: those with scores share it.
    `distances`: numbers in shared memory of their own through which sums of gradients by distance pass.
    `written`: how products are, see `fused/tiles/written.py`.
    """

    warpgroups: ClassVar[int] = 2
    q_stages: ClassVar[int] = 2
    ds_stages: ClassVar[int] = 2

    do_stages: int
    dq_split: Literal["columns", "rows", "transposed"]
    consumer_registers: int
    producer_registers: int
    dq_later: bool = False
    dq_in_bulk: bool = False
    passing: bool = False
    tries_first: bool = False
    lse_ahead: int = 0
    dv_later: bool = False
    bends_early: bool = True
    held_k: int = 0
    held_v: int = 0
    part_columns: int = 0
    distances: int = 0
    written: Written = (
        "by steps"  # `backward_pair` loses 4 % by whole ones; `backward_keys_apart` and `backward_choice` choose
    )

    def __post_init__(self) -> None:
        """Raises `AssertionError` for what leaves dQ unwritten, or blocks that wait for each other in a circle."""
        if self.claimed_parts or self.first_writes:
            # reductions from registers add to what nobody cleared
            assert self.dq_in_bulk, "who comes first at dQ writes it, which only copies from shared memory do"
        if self.claimed_parts:
            assert self.claimed_parts == self.dq_parts, "each warpgroup claims its part of a tile of dQ"
        if self.short_rows:
            assert self.dq_later and self.dq_in_bulk, "who sends dQ takes it from a tile of fewer queries too"
            assert self.dq_split == "transposed", "products with 64 queries as rows have no fewer"
            assert not self.ends_backwards, "a tile of fewer queries comes last"

    @property
    def in_stretches(self) -> bool:
        fits = self.kernel == "backward" and self.d == self.dv
        return fits and not (self.ends_backwards or self.claimed_parts)

    @property
    def key_groups(self) -> int:
        return self.warpgroups if self.passing else 1

    @property
    def shared_keys(self) -> bool:
        return self.kernel == "backward_wide" or self.dq_apart

    @property
    def dq_apart(self) -> bool:
        """Whether a warpgroup of its own computes dQ, `part_columns` at a time."""
        return self.part_columns > 0

    @property
    def dq_parts(self) -> int:
        """Of a tile of dQ, each a warpgroup's, of all blocks that share it; or those that one computes in turn."""
        return self.d // self.part_columns if self.dq_apart else self.warpgroups * self.sharing

    @property
    def dq_registers(self) -> int:
        """Of a warpgroup that has dQ: what the others leave."""
        return 512 - self.producer_registers - 2 * self.consumer_registers

    @property
    def dq_numbers(self) -> int:
        """Of shared memory through which dQ leaves in bulk: a room for each warpgroup."""
        return self.tile_m * self.d

    @property
    def dk_parts(self) -> int:
        """Blocks that have columns of dK and dV side by side."""
        return 1

    @property
    def statistic_stride(self) -> int:
        """From a query tile's row statistics to the next one's, in fp32: tensor copies take addresses of 128 bytes."""
        return -(-self.tile_m // 32) * 32

    def shared_memory(self, element_bytes: int) -> int:
        stationary = self.tile_n * (self.d + self.dv)
        moving = self.tile_m * (self.q_stages * self.d + self.do_stages * self.dv)
        scores = self.ds_stages * self.tile_m * self.tile_n
        # barriers and row statistics, in front of tiles that begin at whole 1024 bytes
        statistics = self.q_stages + (self.q_stages if self.shared_keys else self.do_stages)
        front = -(-(512 + 4 * self.statistic_stride * statistics) // 1024) * 1024
        weights = 4 * self.tile_m * self.tile_n if self.shared_keys else 0
        dq = 4 * self.dq_numbers if self.dq_in_bulk else 0
        if self.persistent and not self.dq_in_bulk:
            stationary *= 2
        return element_bytes * (stationary + moving + scores) + weights + dq + 4 * self.distances + front

    def describe(self) -> dict[str, str]:
        keys = "the same keys" if self.shared_keys else f"{self.tile_n // self.warpgroups} keys each"
        return {
            "stages": f"Q {self.q_stages}, dO {self.do_stages}, dS {self.ds_stages}",
            "roles": f"1 copying warp, {self.warpgroups} warpgroups of {keys}; "
            f"registers {self.consumer_registers}/{self.producer_registers}",
            "dQ": f"summed in fp32 in memory, shared by {self.dq_split}",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBackwardTiling(HopperBackwardTiling):
    """Two blocks have the same keys, each half of the columns of Q, K, V, dO and of what is summed (`of_block`)."""

    kernel: str = "backward_pair"
    sharing: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return HopperBackwardTiling(**kept | {"kernel": "backward_wide", "d": self.d // 2, "dv": self.dv // 2})

    @property
    def dk_parts(self) -> int:
        return self.sharing

    @property
    def exchanged(self) -> int:
        """Numbers in shared memory, through which a block has the other's part of a score product."""
        return self.tile_m * self.tile_n

    def shared_memory(self, element_bytes: int) -> int:
        return self.of_block.shared_memory(element_bytes) + 4 * self.warpgroups * self.exchanged

    def describe(self) -> dict[str, str]:
        d, dv = self.of_block.d, self.of_block.dv
        return {
            **self.of_block.describe(),
            "blocks": f"2 of the same keys, each {d} columns of D and {dv} of Dv; scores are added up between them",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBackwardTiling(HopperBackwardTiling):
    """Two blocks have half of a tile's keys each (`of_block`), and half of the columns of dQ, from the keys of both."""

    kernel: str = "backward_exchange"
    sharing: ClassVar[int] = 2

    @property
    def of_block(self) -> HopperBackwardTiling:
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return HopperBackwardTiling(**kept | {"kernel": "backward_apart", "tile_n": self.block_keys})

    def shared_memory(self, element_bytes: int) -> int:
        across = self.block_keys * (self.d // 2 + self.ds_stages * self.tile_m)
        return self.of_block.shared_memory(element_bytes) + element_bytes * across

    def describe(self) -> dict[str, str]:
        keys, columns = self.block_keys, self.d // 2
        return {
            **self.of_block.describe(),
            "blocks": f"2 of {keys} keys each, which exchange dS; each has {columns} columns of dQ",
        }
