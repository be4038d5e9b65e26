"""Where the columns lie whose captured value compares with that of the row: per row, the ends of their ranges."""

from __future__ import annotations

import torch

from ..graph.expr import Capture
from ..graph.linear import FAR
from .derived import Derived, countable, derive, derives_anew

START, FULL_END, END, FULL_START = range(4)
FIRST, STOP = range(2)


class Matches(Derived):
    """A table of `matches` or `reached`: pairs of ends, outer and inner, the first with the last, and so on.

    What rows see together begins at the smallest START, what all see at the largest: a tile asks for the smallest of
    the first half of the ends, for the largest of the others.
    """

    __slots__ = ()

    @property
    def range(self) -> tuple[int, int]:
        return 0, FAR

    @property
    def half(self) -> int:
        return self.kept.shape[0] // 2

    def without_gaps(self, end: int) -> int:
        """The end that is the same one where nothing between does not match."""
        return end if end % 2 == 0 else 2 * self.half - 1 - end


def matches(
    op: str,
    rows: Capture,
    columns: Capture,
    rows_order: tuple[int, ...],
    columns_order: tuple[int, ...],
) -> Matches:
    """int32 (4, B|1, H|1, Sq): per row, where the columns with `column op row` begin and end, and a range of such only.

    In the order of `START`, `FULL_END`, `END`, `FULL_START`.

    `op` is eq, lt, le, gt or ge; the values are integers. `*_order` are the dimensions of the tensors that stand for
    (b, h, position); -1 where there is none. A row with no such column gets empty ranges. The range of such only is
    the whole where it has no gap, else (of an inequality) the longer of those that begin at 0 and that reach the end.
    The columns beyond the end of `columns` repeat its last one, as reads do, hence a range that reaches it has no end.
    """

    same = rows == columns and rows_order == columns_order

    def bounds_of_matches(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        c = _arranged(c, columns_order)
        if same and op == "eq":
            return _equal_to_itself(c.contiguous()).to(torch.int32)
        r, c = _arranged(r, rows_order), c.to(torch.int64)
        lead = [max(sizes) for sizes in zip(r.shape[:2], c.shape[:2], strict=True)]
        r, c = _reaching(r.to(torch.int64), lead), _reaching(c, lead)
        if op == "eq":
            return _equal(r, c)
        if op in ("gt", "ge"):
            r, c = ~r, ~c  # turns the order around, with no number that has no opposite
        return _below(r, c, strictly=op in ("lt", "gt"))

    return derive((op, rows_order, columns_order), bounds_of_matches, rows, columns, kind=Matches)


def reached(columns: Capture, columns_order: tuple[int, ...], strictly: bool) -> Matches:
    """int32 (2, B|1, H|1, Skv + 1): per position, FIRST and STOP: columns before FIRST have a value that is not above
    it (`strictly`: that is below it), columns from STOP on have not.

    They are the same where values ascend. The last entry serves all positions from Skv on. `columns_order` as in
    `matches`; here too columns beyond the end repeat the last one.
    """

    def ends(c: torch.Tensor) -> torch.Tensor:
        c = _arranged(c, columns_order).to(torch.int64)
        n = c.shape[-1]
        at = torch.arange(n + 1, device=c.device).expand(*c.shape[:2], n + 1).contiguous()
        largest, smallest_after = c.cummax(-1).values, c.flip(-1).cummin(-1).values.flip(-1).contiguous()
        first, stop = (torch.searchsorted(x, at, right=not strictly) for x in (largest, smallest_after))
        stop[..., n] = n  # larger values than there are columns may lie anywhere
        found = torch.stack([first, stop])
        return found.masked_fill_(found == n, FAR).to(torch.int32)

    return derive(("reached", columns_order, strictly), ends, columns, kind=Matches)


def without_gaps(table: Matches) -> Derived:
    """int32 (B|1, H|1) for a table of `matches` or `reached`: 1 where no row has gaps in its matching columns."""
    return derive(("without gaps",), _without_gaps, table)


def _without_gaps(table: torch.Tensor) -> torch.Tensor:
    half = table.shape[0] // 2
    return (table[:half] == table[half:].flip(0)).amin((0, -1)).to(torch.int32)


def _equal(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    n = c.shape[-1]
    ordered, where = c.sort(dim=-1, stable=True)
    left, right = torch.searchsorted(ordered, r), torch.searchsorted(ordered, r, right=True)
    some = right > left
    start = where.gather(-1, left.clamp(max=n - 1))
    end = where.gather(-1, (right - 1).clamp(min=0)) + 1
    whole = some & (end - start == right - left)
    return _ranges(start, end, some, start, end, whole, n)


def _equal_to_itself(c: torch.Tensor) -> torch.Tensor:
    """`_equal` of a tensor and itself, where no row is without a match."""
    n = c.shape[-1]
    # elsewhere a look would wait, and who derives anew may do so again of other contents
    if c.device.type == "cpu" and not derives_anew() and bool((c[..., 1:] >= c[..., :-1]).all()):
        return _runs(c)
    ordered, where = c.sort(dim=-1, stable=True)
    first, stop = torch.searchsorted(ordered, c), torch.searchsorted(ordered, c, right=True)
    start, end = where.gather(-1, first), where.gather(-1, stop - 1).add_(1)
    apart = end - start != stop.sub_(first)
    end.masked_fill_(end == n, FAR)
    table = torch.stack([start, end, end, start])
    table[FULL_END].masked_fill_(apart, 0)
    table[FULL_START].masked_fill_(apart, FAR)
    return table


def _runs(c: torch.Tensor) -> torch.Tensor:
    """`_equal_to_itself` of ascending values: with no search, several times as fast on a CPU."""
    n = c.shape[-1]
    at = torch.arange(n, dtype=torch.int32, device=c.device).expand_as(c)
    same = c.new_zeros((2, *c.shape), dtype=torch.bool)  # as the one before, as the one behind
    torch.eq(c[..., 1:], c[..., :-1], out=same[0, ..., 1:])
    same[1, ..., :-1] = same[0, ..., 1:]
    first = at.masked_fill(same[0], 0).cummax(-1).values
    last = at.masked_fill(same[1], n - 1).flip(-1).cummin(-1).values.flip(-1)
    end = (last + 1).masked_fill_(last == n - 1, FAR)
    return torch.stack([first, end, end, first])


def _below(r: torch.Tensor, c: torch.Tensor, strictly: bool) -> torch.Tensor:
    """Where c <= r, or c < r: running extremes are monotone, whatever c is, and bound it from both sides."""
    n = c.shape[-1]
    smallest, largest = c.cummin(-1).values, c.cummax(-1).values
    smallest_after, largest_after = c.flip(-1).cummin(-1).values.flip(-1), c.flip(-1).cummax(-1).values.flip(-1)
    start = torch.searchsorted((~smallest).contiguous(), ~r, right=strictly)
    end = torch.searchsorted(smallest_after.contiguous(), r, right=not strictly)
    all_before = torch.searchsorted(largest.contiguous(), r, right=not strictly)
    all_from = torch.searchsorted((~largest_after).contiguous(), ~r, right=strictly)
    at_start = all_before >= n - all_from
    full_start, full_end = torch.where(at_start, 0, all_from), torch.where(at_start, all_before, n)
    return _ranges(start, end, end > 0, full_start, full_end, full_start < full_end, n)


def _ranges(
    start: torch.Tensor,
    end: torch.Tensor,
    some: torch.Tensor,
    full_start: torch.Tensor,
    full_end: torch.Tensor,
    full: torch.Tensor,
    n: int,
) -> torch.Tensor:
    end, full_end = torch.where(end == n, FAR, end), torch.where(full_end == n, FAR, full_end)
    return torch.stack(
        [
            torch.where(some, start, FAR), torch.where(full, full_end, 0),
            torch.where(some, end, 0), torch.where(full, full_start, FAR),
        ]
    ).to(torch.int32)  # fmt: skip


def _arranged(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`x` as (b, h, position), of a type that torch searches."""
    x = countable(x.detach())
    x = x.permute([d for d in order if d >= 0])
    for position, d in enumerate(order):
        if d < 0:
            x = x.unsqueeze(position)
    return x


def _reaching(x: torch.Tensor, lead: list[int]) -> torch.Tensor:
    """`x` for `lead` batches and heads: beyond its end its last one stands, as in reads."""
    for d, count in enumerate(lead):
        if 1 < x.shape[d] < count:
            x = x.index_select(d, torch.arange(count, device=x.device).clamp(max=x.shape[d] - 1))
    return x.expand(*lead, -1).contiguous()
