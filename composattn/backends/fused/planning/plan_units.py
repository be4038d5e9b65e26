"""The kernel before a backward that sums gradients of captured tensors: in which units."""

from __future__ import annotations

import dataclasses

from .plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitsPlan(Plan):
    """Units for so many `sums`, from all rows of dO and V; `used_q`, `used_kv`: of packed ones some may be unused."""

    step = "units"
    head_dim_v: int
    is_dense: bool
    used_q: bool
    used_kv: bool
    has_dlse: bool
    sums: int
