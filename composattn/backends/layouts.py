"""Every layout as (B, H, S, D) tensors and the parts of them that are sequences: how the PyTorch backends see a call.

Packed rows become a batch of one, in which each sequence is a range of rows; keys in pages are gathered and then
packed; dense queries over them are packed too. The ranges are numbers of the host: reading them waits for the device.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from ..call.checks import check_pages, ranges
from ..call.sequences import Sequences


class SequenceRows(NamedTuple):
    """A sequence, or all of a dense call's at once: the number of the (first) one, its queries and its keys."""

    b: int
    queries: slice
    keys: slice


class DenseLayout:
    """A dense call, as it stands."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor) -> None:
        self.parts = [SequenceRows(0, slice(0, q.shape[2]), slice(0, k.shape[2]))]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """q, out or a gradient of theirs, as (B, H, S, n)."""
        return x

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """k, v or a gradient of theirs, as (B, H, S, n)."""
        return x

    def statistics(self, x: torch.Tensor) -> torch.Tensor:
        """lse or its gradient, as (B, H, S)."""
        return x

    def queries_back(self, x: torch.Tensor) -> torch.Tensor:
        """What `queries` undoes."""
        return x

    def keys_back(self, x: torch.Tensor) -> torch.Tensor:
        """What `keys` undoes."""
        return x

    def statistics_back(self, x: torch.Tensor) -> torch.Tensor:
        """What `statistics` undoes."""
        return x


class PackedLayout(DenseLayout):
    """Packed queries and keys."""

    def __init__(self, sequences: Sequences, q_rows: int | None = None, kv_rows: int | None = None) -> None:
        assert sequences.cu_q is not None and sequences.cu_k is not None
        queries = ranges("q", sequences.cu_q, sequences.used_q, q_rows)
        keys = ranges("k", sequences.cu_k, sequences.used_k, kv_rows)
        self.parts = [SequenceRows(b, *both) for b, both in enumerate(zip(queries, keys, strict=True))]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).unsqueeze(0)

    queries = keys

    def statistics(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def keys_back(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0).transpose(0, 1)

    queries_back = keys_back

    def statistics_back(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0)


class PagedKeys(PackedLayout):
    """Keys in pages, packed queries."""

    def __init__(self, sequences: Sequences, page_size: int, q_rows: int | None = None) -> None:
        assert sequences.page_table is not None and sequences.used_k is not None
        self.table, self.page_size = sequences.page_table, page_size
        cu_k = torch.nn.functional.pad(sequences.used_k.cumsum(0), (1, 0))
        super().__init__(sequences._replace(cu_k=cu_k, used_k=None), q_rows)

    @cached_property
    def pages(self) -> torch.Tensor:
        """(pages,): those that hold keys, by sequence."""
        counts = [-(-(part.keys.stop - part.keys.start) // self.page_size) for part in self.parts]
        return torch.cat([row[:n] for row, n in zip(self.table, counts, strict=True)])

    @cached_property
    def rows(self) -> torch.Tensor:
        """(total,): where in those pages, one after the other, the keys of all sequences are."""
        found, start = [], 0
        for part in self.parts:
            length = part.keys.stop - part.keys.start
            found.append(torch.arange(start, start + length, device=self.table.device))
            start += -(-length // self.page_size) * self.page_size
        return torch.cat(found)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.pages].transpose(0, 1).flatten(1, 2)[:, self.rows].unsqueeze(0)


class PagedKeysDenseQueries(PagedKeys):
    """Keys in pages, dense queries."""

    def __init__(self, sequences: Sequences, page_size: int, q: torch.Tensor) -> None:
        self.batched = (q.shape[0], q.shape[2])
        cu_q = q.shape[2] * torch.arange(q.shape[0] + 1, device=q.device)
        super().__init__(sequences._replace(cu_q=cu_q), page_size)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def statistics(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries(x)

    def queries_back(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(0).unflatten(1, self.batched).transpose(0, 1)

    def statistics_back(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries_back(x).contiguous()


def arrange(sequences: Sequences, q: torch.Tensor, k: torch.Tensor) -> DenseLayout:
    """How to see the tensors of a call; waits for the device unless it is dense."""
    if sequences.page_table is None:
        return DenseLayout(q, k) if sequences.cu_q is None else PackedLayout(sequences, q.shape[0], k.shape[0])
    assert sequences.used_k is not None
    check_pages(sequences.page_table, sequences.used_k, k.shape[2], k.shape[0])  # what follows reads them on the host
    if sequences.cu_q is None:
        return PagedKeysDenseQueries(sequences, k.shape[2], q)
    return PagedKeys(sequences, k.shape[2], q.shape[0])
