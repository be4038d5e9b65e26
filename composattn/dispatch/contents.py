"""Where `debug_checks` are on: what the lengths, blocks and indices of a call hold, looked at before it runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..analysis.outside_reads import Scores, asks_for_scores, refuse_outside_reads
from ..analysis.program import Program
from ..backends.layouts import arrange
from ..call import checks
from ..call.autograd import without_autocast
from ..call.block_sparse import Table
from ..call.inputs import Inputs
from ..call.problem import softmax_scale


def check_call(program: Program, tables: Iterable[Table], inputs: Inputs, scale: float | None) -> None:
    """All of it; `scale` as a call is given it."""
    if checks.are_on:
        check_contents(inputs)
        check_blocks(tables)
        check_reads(program, inputs, scale)


def check_blocks(tables: Iterable[Table]) -> None:
    """Where `debug_checks` are on, checks what the tensors of a `BlockSparse` hold."""
    if checks.are_on:
        for table in tables:
            table.check_contents()


def check_contents(inputs: Inputs) -> None:
    """Where `debug_checks` are on, checks what the tensors of `varlen` and `paged` hold, for q and k of their form."""
    if not checks.are_on:
        return
    checks.refuse_capture()
    q, k, _, varlen, paged = inputs
    if varlen is not None:
        lengths = checks.check_offsets("cu_seqlens_q", varlen.cu_seqlens_q, "q", q.shape[0])
        used = checks.check_used("seqused_q", varlen.seqused_q, lengths)
        checks.check_maximum("max_seqlen_q", varlen.max_seqlen_q, used)
        if paged is None:
            if varlen.cu_seqlens_k is not None:
                used = lengths = checks.check_offsets("cu_seqlens_k", varlen.cu_seqlens_k, "k", k.shape[0])
            if varlen.seqused_k is not None:
                used = checks.check_used("seqused_k", varlen.seqused_k, lengths)
            checks.check_maximum("max_seqlen_k", varlen.max_seqlen_k, used)
    if paged is not None:
        checks.check_pages(paged.page_table, paged.seqused, paged.page_size, k.shape[0])


def check_reads(program: Program, inputs: Inputs, scale: float | None) -> None:
    """Checks that what the mods read is inside of the captured tensors.

    inputs: those of a call whose contents are checked. Raises: `CapturedIndexOutOfRange`.
    """
    if checks.are_on and program.captures:
        with torch.no_grad():
            without_autocast(inputs.q, _check_reads, program, inputs, scale)


def _check_reads(program: Program, inputs: Inputs, scale: float | None) -> None:
    form = arrange(inputs.sequences, inputs.q, inputs.k)
    q = form.queries(inputs.q)
    k = form.keys(inputs.k) if asks_for_scores(program) else None  # a copy, of keys in pages
    batch, heads, _, head_dim = q.shape
    for first, queries, keys in form.parts:
        of_part = None
        if k is not None:
            of_part = Scores(q[:, :, queries], k[:, :, keys], softmax_scale(scale, head_dim))
        lengths = queries.stop - queries.start, keys.stop - keys.start
        refuse_outside_reads(program, range(first, first + batch), heads, *lengths, q.device, of_part)
