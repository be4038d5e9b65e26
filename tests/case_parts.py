"""A part of a random call: some of its batch entries and heads, from a query on, with mods that are shifted there."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from composattn.call.block_sparse import Table
from composattn.graph.expr import index, walk
from composattn.graph.scalar import Scalar
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.testing.tolerance import Case


def draw_part(choices: random.Random, case: Case) -> tuple[Case, tuple[slice, slice, slice]] | None:
    """The part as a case of its own, and its batch entries, query heads and queries in the whole.

    Each offset is an int, a `ca.scalar` or a tensor. Without dropout, which asks where a pair stands in the call. None
    for packed and paged cases, and where a mod asks for the number of queries, or of blocks: these are the part's.
    """
    program = case.program
    has_blocks = any(isinstance(capture, Table) for capture in program.captures)
    asks_length = index("q_len") in walk(*(mod for mod in program.mods if mod is not None))
    if case.varlen is not None or case.paged is not None or has_blocks or asks_length:
        return None
    batch, q_heads, q_len, kv_heads = *case.q.shape[:3], case.k.shape[1]
    b, kv_head, q = (choices.randint(0, size - 1) for size in (batch, kv_heads, q_len))
    group = q_heads // kv_heads
    place = slice(b, batch), slice(group * kv_head, q_heads), slice(q, q_len)
    by = {name: _offset(choices, begin.start, case.q.device) for name, begin in zip("bhq", place, strict=True)}
    of_keys = place[0], slice(kv_head, kv_heads)
    sinks = None if case.sinks is None else case.sinks.detach()[place[1]].requires_grad_(case.sinks.requires_grad)
    part = dataclasses.replace(
        case,
        q=case.q[place],
        k=case.k[of_keys],
        v=case.v[of_keys],
        score_mod=None if case.score_mod is None else Score.of(case.score_mod).shifted(**by),
        mask_mod=None if case.mask_mod is None else Mask.of(case.mask_mod).shifted(**by),
        dout=None if case.dout is None else case.dout[place],
        dlse=None if case.dlse is None else case.dlse[place],
        sinks=sinks,
        dropout=(0.0, 0),
        name=f"from {b}, {place[1].start}, {q} on: {case.name}",
    )
    return part, place


def _offset(choices: random.Random, number: int, device: torch.device) -> Any:
    return choices.choice((number, Scalar(number), torch.tensor(number, device=device)))
