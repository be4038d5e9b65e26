"""Kernels, ours and the peer's, as what the model sees of them: machine code, threads, tiles; read alike."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, Pattern, causal_mask
from benchmarks.model.loops import Role, roles
from benchmarks.model.peer import PeerCall, peer_kernel
from benchmarks.model.sass import SassInstruction, disassembled
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import assembly
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import TARGETS as GPUS
from composattn.backends.fused.tiles.target import Target
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods.mask import Mask
from composattn.mods.score import Score

PACKED = Layout("packed", "packed", keys_lie_as_queries=True)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A main kernel of one direction.

    `rows` x `keys` is what a block computes at a time, and `queries` of the rows' queries; `d` and `dv` are what the
    products see. `heads`: query heads that share a block's rows or follow each other in it. `interleaved`: the longest
    tiles of many heads start first, else head follows head. `pieces`: blocks that share a tile of keys, but for the
    first `whole`.
    `transposed`: see `roofline.backward_rows`. `together`: blocks that share an SM. `in_segments`: tiles
    begin with documents, as those of packed sequences do.
    """

    cubin: Path
    threads: int
    direction: str
    rows: int
    queries: int
    keys: int
    d: int
    dv: int
    heads: int = 1
    interleaved: bool = True
    pieces: int = 1
    transposed: bool = False
    together: int = 1
    whole: int = 0
    in_segments: bool = False

    @property
    def code(self) -> tuple[SassInstruction, ...]:
        return _code(self.cubin)

    @functools.cached_property
    def roles(self) -> dict[str, list[Role]]:
        """By job."""
        found: dict[str, list[Role]] = {}
        for role in roles(self.code):
            found.setdefault(role.job, []).append(role)
        return found

    @property
    def spills(self) -> int:
        """Instructions that reach local memory."""
        return sum(i.name in ("LDL", "STL") for i in self.code)


@functools.cache
def _code(cubin: Path) -> tuple[SassInstruction, ...]:
    found = disassembled(assembly(cubin))
    if not found:
        raise FileNotFoundError("nvdisasm is needed: pip install nvidia-cuda-nvdisasm")
    return found


def target_of(arch: str) -> Target:
    return next(t for t in GPUS.values() if t.arch == arch)


def ours(case: Case, pattern: Pattern, arch: str, packed: bool = False) -> Kernel:
    """Our kernel of a case; `packed`: documents as sequences, where they were a mask."""
    plan = plan_of(case, pattern, target_of(arch), packed)
    if case.direction == "forward":
        queries, keys, heads, whole, pieces = plan.tiling.queries, plan.tiling.tile_n, plan.tiling.packed_heads, 0, 1
    else:
        queries, keys, heads = plan.tiling.tile_m, plan.tiling.block_keys, case.heads // case.kv_heads
        whole, pieces = (0, 1) if plan.cut is None else (plan.cut.whole, plan.cut.pieces)
        whole *= plan.tiling.tile_n // keys  # blocks that share a tile of keys
    made, cut = compile_offline(plan), plan.tiling
    return Kernel(
        made.cubin_path, made.threads, case.direction, cut.tile_m, queries, keys, cut.d, cut.dv, heads,
        pieces=pieces, transposed=arch != "sm_90a" and plan.step in ("backward_wide", "backward_query_pair"),
        together=getattr(cut, "blocks", 1), whole=whole, in_segments=plan.has_segments,
    )  # fmt: skip


def plan_of(case: Case, pattern: Pattern, target: Target, packed: bool = False, deterministic: bool = False) -> Any:
    """The plan of our main kernel of a case; `packed`: documents as sequences, where they were a mask.

    `deterministic`: a backward sums in a fixed order.
    """
    score, mask = pattern.score_mod, pattern.mask_mod
    if packed:
        mask = causal_mask if pattern.causal else None
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    problem = _problem(case, len(pattern.document_starts) - 1 if packed else 0)
    if case.direction == "forward":
        return plan_forward(problem, program, target)
    return plan_backward(problem, program, target, deterministic=deterministic).main


def _problem(case: Case, documents: int) -> Problem:
    """The problem of a dense call, or with its documents as so many packed sequences of each batch entry."""
    packed = documents > 0
    times = case.batch if packed else 1  # sequences lie one behind the other
    return Problem(
        case.batch * max(1, documents), case.heads, case.kv_heads, times * case.q_len, times * case.kv_len, case.dim,
        case.v_dim, case.dtype, torch.device("cpu"), layout=PACKED if packed else DENSE,
    )  # fmt: skip


def peers(case: Case, pattern: Pattern, arch: str) -> Kernel:
    """flash-attn-4's of the same case; documents are sequences there.

    Its forward packs the heads of a group into a tile's rows, its backward gives each a block of its own. Only its
    causal forward starts the longest tiles of many heads first.
    """
    group, forward = case.heads // case.kv_heads, case.direction == "forward"
    call = PeerCall(
        case.direction, case.dim, case.v_dim, group, pattern.causal, pattern.left_window, pattern.softcap,
        pattern.alibi_slopes is not None, bool(pattern.document_starts),
    )  # fmt: skip
    made = peer_kernel(call, arch)
    rows, heads = made.tile_m * made.stages, group if forward else 1
    return Kernel(
        made.cubin, made.threads, case.direction, rows, rows // heads, made.tile_n, case.dim, case.v_dim, heads,
        interleaved=forward and pattern.causal and not pattern.document_starts,
    )  # fmt: skip
