"""Which tiles of a case each block visits, and which of them need a test: counted from the mask's intervals of keys."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Case, Pattern

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Visits:
    """How many tiles each block of one head has, without a test and with one."""

    plain: Ints
    tested: Ints


def seen_keys(case: Case, pattern: Pattern) -> tuple[Ints, Ints]:
    """First key that each query sees, and the one behind its last."""
    q = np.arange(case.q_len)
    first, behind = np.zeros_like(q), np.full_like(q, case.kv_len)
    if pattern.document_starts:
        starts = np.array(pattern.document_starts)
        of = np.searchsorted(starts, q, side="right") - 1
        first, behind = starts[of], starts[of + 1]
    if pattern.causal:
        behind = np.minimum(behind, q + 1)
    if pattern.left_window is not None:
        first = np.maximum(first, q - pattern.left_window)
    if pattern.prefix:
        behind = np.maximum(q + 1, pattern.prefix)
    return first, behind


def visits(first: Ints, behind: Ints, length: int, queries: int, keys: int, by_keys: bool) -> Visits:
    """Visits of blocks with `queries` queries each (`by_keys`: `keys` keys), over `length` keys of a sequence."""
    cuts = np.arange(0, len(first), queries)
    least, most = np.minimum.reduceat(first, cuts), np.maximum.reduceat(first, cuts)
    ends, last = np.minimum.reduceat(behind, cuts), np.maximum.reduceat(behind, cuts)
    begin = np.arange(0, length, keys)
    end = np.minimum(begin + keys, length)
    visited = (least[:, None] < end) & (last[:, None] > begin)
    whole = (most[:, None] <= begin) & (ends[:, None] >= end)
    axis = 0 if by_keys else 1
    return Visits((visited & whole).sum(axis), (visited & ~whole).sum(axis))


def of_head(case: Case, pattern: Pattern, queries: int, keys: int, packed: bool) -> list[Visits]:
    """Visits of one head: a list of one, or with `packed` one for each document."""
    first, behind = seen_keys(case, pattern)
    by_keys = case.direction == "backward"
    if not packed:
        return [visits(first, behind, case.kv_len, queries, keys, by_keys)]
    pairs = zip(pattern.document_starts, pattern.document_starts[1:], strict=False)
    return [visits(first[a:b] - a, behind[a:b] - a, b - a, queries, keys, by_keys) for a, b in pairs]


def makespan(times: Iterable[float], sms: int) -> float:
    """When the last block ends, each started on the SM that is free first."""
    free = [0.0] * sms
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)
