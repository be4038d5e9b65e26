"""Results of calls on different keys made one, exactly: by their LSE (Dao et al. 2023, Flash-Decoding)."""

from __future__ import annotations

import math

import torch


class Merged:
    """out, lse and largest scores of all queries of a rank, as the calls on some of their keys come in."""

    def __init__(self, q: torch.Tensor, width: int, max_scores: bool) -> None:
        self._q, self._width, self._wants_max = q, width, max_scores
        self._done: list[slice] = []  # rows that some call has given
        self._dtype: torch.dtype | None = None  # that calls give
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.max_scores: torch.Tensor | None = None

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor, top: torch.Tensor | None) -> None:
        """What a call gave for `rows`."""
        count, self._dtype = self._q.shape[2], out.dtype
        if self.out is None and rows == slice(0, count):
            self.out, self.lse, self.max_scores = out, lse, top if self._wants_max else None
            self._done = [rows]
            return
        if self.out is None:
            self._begin(out.dtype, lse.dtype)
        assert self.out is not None and self.lse is not None
        if any(rows.start < d.stop and d.start < rows.stop for d in self._done):
            self._join(rows, out, lse)
        else:
            self.out[:, :, rows], self.lse[:, :, rows] = out, lse
        if self.max_scores is not None and top is not None:
            torch.maximum(self.max_scores[:, :, rows], top, out=self.max_scores[:, :, rows])
        self._done.append(rows)

    def _begin(self, dtype: torch.dtype, statistics: torch.dtype) -> None:
        batch, heads, count, _ = self._q.shape
        made = self._q.new_zeros((batch, count, heads, self._width), dtype=dtype)
        self.out = made.transpose(1, 2)
        self.lse = self._q.new_full((batch, heads, count), -math.inf, dtype=statistics)
        self.max_scores = torch.full_like(self.lse, -math.inf) if self._wants_max else None

    def _join(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        assert self.out is not None and self.lse is not None
        mine = self.lse[:, :, rows]
        # of rows that see nothing on either side the difference is NaN, and both outputs are 0
        above = (lse - mine).nan_to_num(0.0, math.inf, -math.inf).unsqueeze(-1)
        if self.out.dtype in (torch.float16, torch.bfloat16):
            self.out = self.out.float()  # further joins round no more
        there = self.out[:, :, rows]
        # two weights by one difference: 1 less the other one loses what is light
        there.mul_(torch.sigmoid(-above)).addcmul_(out.to(there.dtype), torch.sigmoid(above).to(there.dtype))
        self.lse[:, :, rows] = torch.logaddexp(mine, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(out, lse, max_scores) of all rows; those that no call gave see nothing."""
        if self.out is None:
            self._begin(self._q.dtype, torch.promote_types(self._q.dtype, torch.float32))
        assert self.out is not None and self.lse is not None
        return self.out if self._dtype is None else self.out.to(self._dtype), self.lse, self.max_scores
