"""How the Hopper kernels cut the work: tile sizes by head dimension, and what they refuse."""

from __future__ import annotations

import torch

from ...errors import UnsupportedCapture, UnsupportedDType, UnsupportedHeadDim
from ...graph.expr import Rate, walk
from ...graph.program import Program
from ...plan import Tiling
from ...problem import Problem
from ...target import Target

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)
CAPTURE_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


def check(problem: Problem, program: Program) -> None:
    """Refuses, before compiling, what the kernels can't do."""
    if problem.dtype not in DTYPES:
        raise UnsupportedDType(
            f'backend="hopper" multiplies bfloat16 and float16, got {problem.dtype}; '
            'cast q, k and v, or use backend="streaming"'
        )
    for name, d in (("D", problem.head_dim), ("Dv", problem.head_dim_v)):
        if d > MAX_HEAD_DIM or d % 8:
            raise UnsupportedHeadDim(
                f'backend="hopper" takes {name} in multiples of 8 up to {MAX_HEAD_DIM}, got {d}; '
                'pad with zeros (F.pad) and pass scale=, or use backend="streaming"'
            )
    for capture in program.captures:
        if capture.tensor.dtype not in CAPTURE_DTYPES:
            raise UnsupportedCapture(
                f'backend="hopper" reads captured tensors of {", ".join(map(str, CAPTURE_DTYPES))}, '
                f"got {capture.tensor.dtype}; convert it with .to(torch.float32)"
            )


def padded(d: int) -> int:
    """Head dimension on chip: what a copy with at least 64-byte swizzle and a 16-deep product take."""
    return -(-d // 32) * 32


def forward_tiling(problem: Problem, program: Program, target: Target) -> Tiling:
    """Tiles of the forward kernel; the choices were measured on an H200 (benchmarks/LOG.md)."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    widest = max(d, dv)
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160
    gathers = program.score is not None and any(n.op == "read" and n.rate is Rate.ELEMENT for n in walk(program.score))
    warpgroups = 3 if widest <= 96 and not gathers else 2
    tile_m = 64 * warpgroups
    persistent = problem.schedule.persistent or False  # a fixed stride balances worse than one block a tile
    rows = d + dv if persistent else widest  # O apart from Q, which may be the next tile's by then
    by_registers, by_memory = _by_registers(warpgroups, dv, program), _by_memory(target, tile_m, rows, d + dv)
    return Tiling(
        tile_m=tile_m,
        tile_n=min(by_registers, by_memory, 96 if gathers else 128),
        d=d,
        dv=dv,
        stages=2,
        warpgroups=warpgroups,
        consumer_registers=160 if warpgroups == 3 else 240,
        producer_registers=32 if warpgroups == 3 else 24,
        pingpong=widest <= 128,
        # three warpgroups fill each other's gaps; two gain from a shorter turn
        rescale_early=warpgroups == 3 or dv > 128,
        slack=8.0,
        l2=32 << 20,
        heads_together=problem.schedule.heads_together,
        persistent=persistent,
        separate_o=persistent,
    )


def _by_registers(warpgroups: int, dv: int, program: Program) -> int:
    """Columns that fit a thread: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
    reads = program.mask is not None and any(n.op == "read" for n in walk(program.mask))
    other = 30 if program.score is None and not reads else 36  # values on their way
    free = (160 if warpgroups == 3 else 240) - other - dv // 2
    return free * 4 // 3 // 16 * 16


def _by_memory(target: Target, tile_m: int, rows: int, keys: int) -> int:
    """Columns for which Q and O (`rows` wide) and two stages of K and V (`keys` wide) fit in shared memory."""
    free = target.shared_memory - 1024 - tile_m * rows * 2
    return free // (2 * 2 * keys) // 16 * 16
