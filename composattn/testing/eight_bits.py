"""Cases whose keys and values, or all three tensors, have 8 bits, with scales of every shape that a call takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..call.eight_bits import EIGHT_BITS, narrowed
from ..call.scales import Rows, rows_of
from .site import Site
from .tolerance import Case


def with_eight_bits(site: Site, case: Case) -> Case:
    """The case with k and v, or q too, rounded to 8 bits, times scales that the site draws; forward only."""
    dtype = site.choices.choice(EIGHT_BITS)
    all_three = bool(site.choices.integer(0, 1))
    scales: list[Any] = []
    for rows in rows_of(case.q, case.k, case.v, case.varlen, case.paged):
        wide = rows.name == "q" and not all_three
        scales.append(None if wide or site.choices.integer(0, 4) == 0 else _scale(site, rows))
    q, k, v = (
        x if n == 0 and not all_three else narrowed(x.float(), dtype) for n, x in enumerate((case.q, case.k, case.v))
    )
    out = case.q.dtype if all_three else None
    return dataclasses.replace(case, q=q, k=k, v=v, scales=tuple(scales), out_dtype=out, dout=None, dlse=None)


def _scale(site: Site, rows: Rows) -> torch.Tensor | float:
    """A scale of any kind whose shape can mean nothing else."""
    t, one = rows.tensor, (1,)
    heads = site.choices.choice((t.shape[1], site.kv_heads))
    kinds: dict[str, tuple[int, ...]] = {"number": (), "(1,)": one, "heads": (heads,)}
    if rows.lies == "packed":
        kinds |= {"sequences": (rows.batch, heads, 1, 1)}
        kinds |= {} if rows.name == "v" else {"rows": (t.shape[0], t.shape[1], 1)}
    elif rows.lies == "paged":
        kinds |= {"sequences": (rows.batch, heads), "rows": (*t.shape[:3], 1)}
    else:
        blocks = -(-t.shape[2] // 8)
        kinds |= {"sequences": (rows.batch, heads), "rows": (*t.shape[:3], 1), "blocks": (*t.shape[:2], blocks, 1)}
    if rows.name == "v" and rows.lies != "paged":
        kinds |= {"channels": (rows.batch, t.shape[1], 1, t.shape[-1])}
    shape = kinds[site.choices.choice(list(kinds))]
    if shape == () and site.choices.integer(0, 1):
        return 0.75
    return (0.3 * site.normal(*shape)).exp().float()
