"""Which form the Hopper forward of a call has, and its block: rows of `forward.json`, with what was measured.

To change a row: `python -m benchmarks.sweep`, see docs/design.md. Figures in "why" are of one H200, in turns.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

from ...primitives.rescale_threshold import RescaleThreshold
from ..fused.planning.call_class import CallClass, Facts
from ..fused.planning.tables import Table, all_of, first, table
from ..fused.tiles.few_queries import sharing_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.traits import (
    bytes_at_pairs,
    has_opaque_test,
    keys,
    reads_along_keys,
    reads_any,
    sees_at_most,
    weighs_keys,
)
from .byte_tiling import ByteTiling
from .tiling import FILE, GUESSING, ROWS, HopperTiling, registers_for

NARROW = 2048  # keys of a row up to which batch-invariant tiles may have 64 of them


@dataclasses.dataclass(frozen=True)
class ForwardForm:
    """How a call is cut; `forward_choice` has the tiling of each.

    few: one tile of rows, as many bytes of keys on their way as memory needs. small: one warpgroup a block, two or
    three blocks on an SM. alone: one warpgroup, alone on it. large: two or three warpgroups that share K and
    V. wide: D above 256.

    `guesses`: rows take the maximum before a tile for the tile's own. `stays`: blocks draw one tile after the other.
    """

    kind: Literal["few", "small", "alone", "large", "wide"]
    guesses: bool = False
    stays: bool = False

    @property
    def kernel(self) -> str:
        return GUESSING if self.guesses else "forward"

    def __str__(self) -> str:
        return self.kind + ", guesses" * self.guesses + ", stays" * self.stays

    @staticmethod
    def named(words: str) -> ForwardForm:
        kind, *flags = words.split(", ")
        fields: dict[str, Any] = {"kind": kind, **dict.fromkeys(flags, True)}
        return ForwardForm(**fields)


class Block(NamedTuple):
    """`warpgroups` that share a block; an SM has so many `blocks`, a tile up to so many `keys`.

    `stays`: whether blocks stay whatever the form says.
    """

    warpgroups: int
    blocks: int = 1
    keys: int = 128
    stays: bool = False

    @property
    def scheduler(self) -> Scheduler:
        """How tiles come to blocks that stay: large ones draw them, as tiles that a mask cuts differ.

        103 calls of D 72 to 224 take 0.99 of the time of a fixed stride; six masked ones of D 144 to 224 from 1k on,
        which had one tile a block, take 0.95 of that (sweeps/h200-wide.json).
        """
        return Scheduler.LATE if self.warpgroups > 1 else Scheduler.STRIDE


TABLE: Table[ForwardForm] = table(FILE, "forms", ForwardForm.named)
SERVES: Table[ForwardForm] = table(FILE, "serves", ForwardForm.named)  # what a form can cut, no matter of speed
BLOCKS: Table[Block] = table(FILE, "blocks", lambda said: Block(**said))
TOGETHER: Table[int | None] = table(FILE, "together")  # key/value heads; None: as L2 holds
THRESHOLDS: Table[RescaleThreshold] = table(FILE, "thresholds", lambda said: RescaleThreshold(**said))
TAKEN: Table[int] = table(FILE, "taken")  # columns of registers beside scores and output, of all rows that match
IN_ORDER: Table[int] = table(FILE, "invariant")  # keys of a batch-invariant tile; 0: of other calls
FORMS = tuple(dict.fromkeys(row.says for row in TABLE if row.says.kind not in ("wide", "few")))  # those that compete


def serves(form: ForwardForm, call: CallClass) -> bool:
    """Whether a form can cut calls of a class."""
    return dataclasses.replace(form, stays=False) in set(all_of(SERVES, call))


class ForwardFacts(Facts):
    """Facts of a forward that its tables ask for besides its class, and what tilings of all forms ask."""

    call: CallClass

    @functools.cached_property
    def heads(self) -> int:
        """Query heads that share the rows of a tile."""
        return sharing_heads(self.problem, self.program, ROWS) if self.call.packs else 1

    @property
    def keys(self) -> int:
        return keys(self.problem)

    @property
    def head_bytes(self) -> int:
        """Bytes of a head's keys and values."""
        return 2 * self.keys * sum(self.call.dims)

    @property
    def of_bytes(self) -> bool:
        """Whether K and V come as 8-bit numbers."""
        return self.problem.narrow is not None

    @property
    def scored(self) -> bool:
        return self.program.score is not None

    @property
    def at_pairs(self) -> float:
        """Bytes that are read at each pair."""
        return bytes_at_pairs(self.program.score)

    @property
    def mask_reads(self) -> bool:
        return reads_any(self.program.mask)

    @property
    def opaque(self) -> bool:
        return has_opaque_test(self.program)

    @property
    def narrow(self) -> bool:
        """Whether constants say that rows see few keys."""
        return sees_at_most(NARROW, self.program)

    @functools.cached_property
    def keys_in_order(self) -> int:
        """Keys of a batch-invariant tile, of which D and the mods decide; 0 for other calls."""
        return first(IN_ORDER, self)

    @property
    def fills_registers(self) -> bool:
        """Whether something waits there along the keys."""
        along = reads_along_keys(self.program.score) or weighs_keys(self.program)
        return along or self.keys_in_order > 0

    def keys_by_registers(self, registers: int) -> int:
        """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
        return (registers - sum(all_of(TAKEN, self)) - self.call.dv // 2) * 4 // 3 // 16 * 16

    def registers(self, block: Block) -> int:
        """Registers of a thread that computes."""
        return registers_for(block.warpgroups, block.blocks, self.call.layout == "paged", self.of_bytes).computing

    def tiling(self, kernel: str, **fields: Any) -> HopperTiling:
        """A tiling; of bytes with a stage of each, which is all that a block of many queries needs."""
        alike = self.alike(kernel)
        return ByteTiling(**{"byte_stages": 1, **alike, **fields}) if self.of_bytes else HopperTiling(**alike, **fields)

    def alike(self, kernel: str) -> dict[str, Any]:
        """Fields that are said in one way for all forms; heads together: as asked for, or a table says."""
        return {
            "kernel": kernel,
            "d": self.call.d,
            "dv": self.call.dv,
            "packed_heads": self.heads,
            "heads_together": self.problem.schedule.heads_together or first(TOGETHER, self),
            "threshold": first(THRESHOLDS, self, kernel=kernel),
        }
