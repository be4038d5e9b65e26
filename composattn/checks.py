"""Checks of what tensors of lengths hold, not only of their forms: off unless asked for, since they wait for the GPU.

In use:

    ca.debug_checks(True)                  # from now on, in every thread
    with ca.debug_checks(): attend(...)    # here only
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import TracebackType

import torch

from . import errors
from .block_sparse import Table
from .sequences import Paged, Varlen

_on = False


class debug_checks:
    """From now on, or inside of `with`, every call has the contents of its lengths and blocks checked.

    That reads them on the host, which waits for the device; a call that is being captured into a CUDA graph can't.
    Compiled code checks as well, when it runs.

    Raises then, at the call: `OffsetsNotMonotone`, `OffsetsOutOfRange`, `UsedOutOfRange`, `PageOutOfRange`,
    `MaximumExceeded`, `BlocksOutOfRange`.
    """

    def __init__(self, on: bool = True) -> None:
        global _on
        self._before, _on = _on, bool(on)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _on
        _on = self._before

    def __repr__(self) -> str:
        return f"debug_checks({_on})"


def check_blocks(tables: Iterable[Table]) -> None:
    """Where `debug_checks` are on, checks what the tensors of a `BlockSparse` hold."""
    if _on:
        for table in tables:
            table.check_contents()


def check_contents(q: torch.Tensor, k: torch.Tensor, varlen: Varlen | None, paged: Paged | None) -> None:
    """Where `debug_checks` are on, checks what the tensors of `varlen` and `paged` hold, for q and k of their form."""
    if not _on:
        return
    if varlen is not None:
        lengths = _check_offsets("cu_seqlens_q", varlen.cu_seqlens_q, "q", q.shape[0])
        used = _check_used("seqused_q", varlen.seqused_q, lengths)
        _check_maximum("max_seqlen_q", varlen.max_seqlen_q, used)
        if paged is None:
            if varlen.cu_seqlens_k is not None:
                lengths = _check_offsets("cu_seqlens_k", varlen.cu_seqlens_k, "k", k.shape[0])
                used = lengths
            used = _check_used("seqused_k", varlen.seqused_k, lengths) if varlen.seqused_k is not None else used
            _check_maximum("max_seqlen_k", varlen.max_seqlen_k, used)
    if paged is not None:
        _check_pages(paged, k.shape[0])


def _check_offsets(name: str, offsets: torch.Tensor, of: str, total: int) -> list[int]:
    """The lengths that `offsets` say."""
    at = offsets.tolist()
    if at[0] != 0:
        raise errors.OffsetsOutOfRange(f"{name} begins with {at[0]}; it must begin with 0: the running sums of lengths")
    lengths = [end - start for start, end in pairwise(at)]
    for b, length in enumerate(lengths):
        if length < 0:
            raise errors.OffsetsNotMonotone(
                f"{name} falls from {at[b]} to {at[b + 1]} at sequence {b}; it must be the running sums of lengths"
            )
    if at[-1] != total:
        raise errors.OffsetsOutOfRange(
            f"{name} ends with {at[-1]}, and {of} has {total} rows; to leave rows out, let a last sequence have them, "
            "with seqused 0"
        )
    return lengths


def _check_used(name: str, used: torch.Tensor | None, lengths: list[int]) -> list[int]:
    """How many rows of each sequence are used."""
    if used is None:
        return lengths
    counts: list[int] = used.tolist()
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= length:
            raise errors.UsedOutOfRange(f"{name} is {count} for sequence {b}, which has room for {length}")
    return counts


def _check_maximum(name: str, maximum: int | None, lengths: list[int]) -> None:
    if maximum is not None and max(lengths) > maximum:
        raise errors.MaximumExceeded(
            f"{name} is {maximum}, and sequence {lengths.index(max(lengths))} has {max(lengths)}; leave it out, or "
            "give an upper bound"
        )


def _check_pages(paged: Paged, num_pages: int) -> None:
    table: list[list[int]] = paged.page_table.tolist()
    room = len(table[0]) * paged.page_size
    counts = _check_used("seqused", paged.seqused, [room] * len(table))
    for b, (row, count) in enumerate(zip(table, counts, strict=True)):
        for i, page in enumerate(row[: -(-count // paged.page_size)]):
            if not 0 <= page < num_pages:
                raise errors.PageOutOfRange(
                    f"page_table[{b}, {i}] is {page}, and there are {num_pages} pages; entries up to "
                    f"ceil(seqused / {paged.page_size}) must be pages of k"
                )
