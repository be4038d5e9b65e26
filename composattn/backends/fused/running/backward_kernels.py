"""The kernels of a backward, launched in turn: which of them gets what of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....call.sequences import Sequences
from ..planning.arguments import PiecesArguments, SinkArguments
from .scratch import Memory

Kernel = Callable[..., Any]
T = torch.Tensor
BackwardTensors = tuple[T, T, T, T, T, T, T | None, T, T, T]  # q, k, v, out, lse, dout, dlse, dq, dk, dv
SinkGradient = tuple[torch.Tensor, torch.Tensor]  # sinks, and memory for their gradient
Tables = tuple[torch.Tensor | None, torch.Tensor | None]  # of the tiles of queries and of keys

Pieces = Callable[[torch.Tensor, torch.Tensor | None], PiecesArguments]


def launches(
    preprocess: Kernel,
    main: Kernel,
    postprocess: Kernel | None,
    gather: Kernel | None,
    pieces_of: Pieces | None,
    shares_keys: bool,
) -> Callable[..., None]:
    """What launches these kernels on the current device; without a postprocess the main one finishes dq.

    `pieces_of`: dk, the table of tiles of keys → the pieces of tiles, which `gather` adds up. `shares_keys`: strips of
    an image have parts of dk and dv.
    """

    def launch(
        tensors: BackwardTensors,
        scale: float,
        reads: Sequence[torch.Tensor],
        numbers: Sequence[float | int],
        sequences: Sequences | None,
        tables: Tables,
        memory: Memory,
        turns_of: tuple[int, ...] | None,
        of_sinks: SinkGradient | None,
    ) -> None:
        """`turns_of`: the shape of the turns in which parts of dQ are added; None: in any order."""
        q, k, v, out, lse, dout, dlse, dq, dk, dv = tensors
        query_tiles, key_tiles = tables
        workspace, dq_accum = memory
        turns = None if turns_of is None else torch.zeros(turns_of, dtype=torch.int32, device=q.device)
        pieces = None if pieces_of is None else pieces_of(dk, key_tiles)
        sinks = None
        if of_sinks is not None:
            sinks = SinkArguments(sinks=of_sinks[0], workspace=workspace, gradient=of_sinks[1])
        captured, scalars = tuple(reads) or None, tuple(numbers) or None
        keys = dk if shares_keys else None
        finished = dq if postprocess is None else None
        preprocess(out, dout, lse, dlse, workspace, dq_accum, sequences, query_tiles, sinks, keys)
        main(
            q, k, v, dout, workspace, dq_accum, dk, dv, pieces, turns, scale, sequences, key_tiles, captured, scalars,
            finished,
        )  # fmt: skip
        if postprocess is not None:
            postprocess(dq_accum, dq, scale, sequences, query_tiles, sinks)
        if gather is not None:
            gather(pieces, dk, dv, sequences)

    return launch
