"""In which order, and by how many blocks, the tiles of a call are computed, as a user asks; results never depend on it.

Longest first evens out the ends of a run on a GPU (Graham 1969, bounds on multiprocessing timing anomalies); splitting
the keys of a query tile over several blocks fills it when there are few queries (Dao et al. 2023, Flash-Decoding).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .. import errors

Order = Literal["auto", "longest_first", "shortest_first", "in_order"]
ORDERS = ("auto", "longest_first", "shortest_first", "in_order")
MOST_SPLITS = 128


@dataclasses.dataclass(frozen=True)
class Schedule:
    """In which order, and by how many blocks, a call's tiles are computed; no result depends on it beyond rounding.

    The plan chooses what is left at its default, and `explain` says what it chose.

    order: of the query tiles (key tiles, in the backward) by the work that their mask leaves them; in a deterministic
        backward the last keys come first, whatever is asked for.
    persistent: one block per SM, each walking over many tiles; False: one block per tile. Forward only.
    heads_together: key/value heads that are worked on at one time, so that their K and V (Q and dO of their queries, in
        the backward) stay in L2; at least 1.
    split_kv: how many parts the keys of a query tile are cut into, one block per part; 1 to 128. The parts are combined
        exactly. "auto" may also deal the keys of the last tiles in equal shares to as many blocks as run at once, where
        tiles fill no whole rounds of blocks.
    pack_gqa: the query heads that share a key/value head as rows of one tile.

    batch_invariant: the same bits for a row whatever else is in the call: other sequences, other queries of its own
        (decode or prefill), packed or paged keys. Its keys are then always summed in the same order, in tiles whose
        size D and the mods decide (a window's width, if a constant), and never in parts. Of the generated kernels'
        forward, for masks whose rows see one run of keys.

    Raises: `InvalidSchedule`.
    """

    order: Order = "auto"
    persistent: bool | None = None
    heads_together: int | None = None
    split_kv: int | Literal["auto"] = "auto"
    pack_gqa: bool | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise errors.InvalidSchedule(f"order is {self.order!r}; it must be one of {', '.join(map(repr, ORDERS))}")
        for name in ("persistent", "pack_gqa"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise errors.InvalidSchedule(f"{name} is {value!r}; it must be True, False or None (the plan chooses)")
        if self.heads_together is not None and not _is_count(self.heads_together):
            raise errors.InvalidSchedule(
                f"heads_together is {self.heads_together!r}; it must be an int of at least 1 or None (the plan chooses)"
            )
        if not isinstance(self.batch_invariant, bool):
            raise errors.InvalidSchedule(f"batch_invariant is {self.batch_invariant!r}; it must be True or False")
        if self.batch_invariant and self.split_kv not in ("auto", 1):
            raise errors.InvalidSchedule(
                f"batch_invariant=True sums all keys of a row in one order, split_kv={self.split_kv} in parts that "
                "depend on the call; leave split_kv out"
            )
        if self.split_kv != "auto" and not (_is_count(self.split_kv) and self.split_kv <= MOST_SPLITS):
            raise errors.InvalidSchedule(
                f"split_kv is {self.split_kv!r}; it must be a number of parts from 1 to {MOST_SPLITS}, or 'auto'"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


AUTO = Schedule()
"""Everything as the plan chooses."""
