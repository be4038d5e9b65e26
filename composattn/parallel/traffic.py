"""How many bytes each strategy moves, how long that and the computation take, and which one is chosen.

Times are estimates, and choose parts only; the strategy is chosen by bytes, which are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import errors
from .division import Division

METHODS = ("auto", "exchange", "gather", "heads")
GATHER_FROM = 0.9  # of all others' rows: from there on all of them are gathered
RECEIVED, COMPUTED = 300e9, 500e12  # bytes and FLOP per second of a rank, which times are estimated with


@dataclass(frozen=True)
class TensorSizes:
    """Sizes of q, k and v over all heads, from which follows how many bytes a row has."""

    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    head_dim_v: int = 128
    element: int = 2

    @property
    def kv_row(self) -> int:
        """Bytes of one key and value, all heads and batches."""
        return self.batch * self.kv_heads * (self.head_dim + self.head_dim_v) * self.element

    @property
    def q_row(self) -> int:
        """Bytes of one query and its output."""
        return self.batch * self.heads * (self.head_dim + self.head_dim_v) * self.element

    def flops(self, pairs: float) -> float:
        """FLOPs of the forward for so many pairs, over all heads and batches."""
        return 2 * pairs * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class Traffic:
    """What was chosen: a method, parts, and the bytes that each rank receives in a forward."""

    method: str
    parts: int
    received: tuple[int, ...]
    shape: TensorSizes


def received_by_heads(division: Division, shape: TensorSizes) -> int:
    """Bytes of q, k, v and the output that a rank receives where heads are shared."""
    rows = division.visits.tiles * division.visits.tile // division.ranks
    share = rows * (division.ranks - 1) // division.ranks
    return share * (shape.q_row + shape.kv_row)


def choose_traffic(
    method: str, parts: int | None, division: Division, seen: torch.Tensor, shape: TensorSizes
) -> Traffic:
    """How the ranks share an attention of this shape. Raises: `HeadsIndivisible` where heads were asked for."""
    by_keys = division.fetched_of(seen)
    rows = division.visits.tiles * division.visits.tile * (1 - 1 / division.ranks)
    by_heads = received_by_heads(division, shape)
    divisible = shape.kv_heads % division.ranks == 0
    if method == "heads" and not divisible:
        raise errors.HeadsIndivisible(
            f"{shape.kv_heads} key/value heads can't be shared by {division.ranks} ranks evenly; "
            'take method="exchange", which moves keys'
        )
    if method == "auto":
        if divisible and division.ranks > 1 and by_heads < max(by_keys) * shape.kv_row:
            method = "heads"
        else:
            method = "gather" if by_keys and min(by_keys) >= GATHER_FROM * rows > 0 else "exchange"
    if method == "heads":
        return Traffic("heads", 1, (by_heads,) * division.ranks, shape)
    each = [int(rows)] * division.ranks if method == "gather" else by_keys
    received = tuple(n * shape.kv_row for n in each)
    if parts is None:  # two where a fetch takes a tenth of the computation: hiding it pays for merging two results
        computing = shape.flops(max(division.pairs, default=0.0) * shape.heads * shape.batch) / COMPUTED
        parts = 2 if max(received, default=0) / RECEIVED > 0.1 * computing else 1
    return Traffic(method, parts, received, shape)
