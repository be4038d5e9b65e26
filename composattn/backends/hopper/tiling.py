"""How the Hopper kernels cut the work: tile sizes by head dimension, and what they refuse."""

from __future__ import annotations

import torch

from ...analysis.bands import untold
from ...analysis.program import Program
from ...call.problem import Problem
from ...call.schedule import MOST_SPLITS
from ...errors import InvalidSchedule, UnsupportedCapture, UnsupportedDType, UnsupportedHeadDim
from ...graph.expr import Dep, Expr, Rate, walk
from ..fused.plan import Tiling, slots
from ..fused.target import Target

MAX_HEAD_DIM = 256
ROWS = 64  # of one warpgroup's product
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
    heads = packed_heads(problem, program)
    if queries(problem) * slots(heads) <= ROWS:
        return _few_rows(problem, program, target, heads)
    widest = max(d, dv)
    # what a score mod reads at (q, kv) waits in registers: 240 for each of two warpgroups instead of 160
    gathers = reads_pairs(program.score)
    warpgroups = 3 if widest <= 96 and not gathers else 2
    tile_m = 64 * warpgroups
    persistent = problem.schedule.persistent or False  # a fixed stride balances worse than one block a tile
    rows = d + dv if persistent else widest  # O apart from Q, which may be the next tile's by then
    by_registers, by_memory = _by_registers(warpgroups, dv, program), _by_memory(target, tile_m, rows, d + dv)
    tile_n = min(by_registers, by_memory, 96 if gathers else 128)
    paged = problem.layout.kv == "paged"
    consumers, producer = (160, 32) if warpgroups == 3 else (232, 40) if paged else (240, 24)
    return Tiling(
        tile_m=tile_m,
        tile_n=_whole_pages(tile_n) if paged else tile_n,
        d=d,
        dv=dv,
        stages=2,
        warpgroups=warpgroups,
        consumer_registers=consumers,
        producer_registers=producer,
        pingpong=widest <= 128,
        # three warpgroups fill each other's gaps; two gain from a shorter turn
        rescale_early=warpgroups == 3 or dv > 128,
        slack=8.0,
        l2=32 << 20,
        heads=heads,
        heads_together=problem.schedule.heads_together,
        persistent=persistent,
        separate_o=persistent,
    )


def _few_rows(problem: Problem, program: Program, target: Target, heads: int) -> Tiling:
    """One warpgroup, and as many bytes of K and V on their way as shared memory holds: memory is the limit."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    gathers = reads_pairs(program.score) or reads_pairs(program.mask)
    tile_n = 128 if max(d, dv) <= 128 and not gathers else 64
    persistent = problem.schedule.persistent or False
    room = target.shared_memory - 1024 - 2 * ROWS * (d + dv if persistent else max(d, dv))
    return Tiling(
        tile_m=ROWS,
        tile_n=tile_n,
        d=d,
        dv=dv,
        stages=min(8, room // (2 * tile_n * (d + dv))),
        warpgroups=1,
        consumer_registers=240,
        producer_registers=40,  # page numbers beside what all copies need
        pingpong=False,
        rescale_early=False,
        slack=8.0,
        l2=32 << 20,
        heads=heads,
        heads_together=problem.schedule.heads_together,
        persistent=persistent,
        separate_o=persistent,
    )


def reads_pairs(graph: Expr | None) -> bool:
    """Whether a tensor is read at (q, kv)."""
    return graph is not None and any(n.op == "read" and n.rate is Rate.ELEMENT for n in walk(graph))


def reads_any(graph: Expr | None) -> bool:
    """Whether a tensor is read at all."""
    return graph is not None and any(n.op == "read" for n in walk(graph))


def has_costly_test(mask: Expr | None) -> bool:
    """Whether a test of the mask reads tensors at a query or a key, or looks at a remainder."""
    if mask is None:
        return False
    fixed = (Rate.CONSTANT, Rate.HEAD)
    return untold(mask).step > 1 or any(n.op == "read" and n.rate not in fixed for n in walk(mask))


def has_opaque_test(program: Program) -> bool:
    """Whether the mask has a condition on (q, kv) that is no bound on kv."""
    return program.mask is not None and untold(program.mask).opaque


def queries(problem: Problem) -> int:
    """Of a sequence: packed, the most that any has, if that is known, else as many as there are on average."""
    packed, most = problem.layout.q == "packed", problem.layout.max_q_len
    return problem.q_len if not packed else -(-problem.q_len // problem.batch) if most is None else most


def keys(problem: Problem) -> int:
    """Of a sequence, as of `queries`; in pages, as many as the page table has room for."""
    packed, most = problem.layout.kv == "packed", problem.layout.max_kv_len
    return problem.kv_len if not packed else -(-problem.kv_len // problem.batch) if most is None else most


def packed_heads(problem: Problem, program: Program) -> int:
    """How many query heads of a key/value head share the rows of a tile; 1 where each has tiles of its own.

    Raises `InvalidSchedule` where packing is asked for and can't be done.
    """
    wanted, group = problem.schedule.pack_gqa, problem.group
    if wanted is False or group == 1:
        return 1
    heads = max(n for n in range(1, min(group, ROWS) + 1) if group % n == 0)
    # heads that see different keys visit different tiles
    by_head = program.mask is not None and bool(program.mask.deps & Dep.H)
    if by_head or heads == 1:
        if wanted:
            why = "the mask depends on the head" if by_head else f"{group} heads share no tile of {ROWS} rows"
            raise InvalidSchedule(f"pack_gqa=True, but {why}; leave pack_gqa=None")
        return 1
    return heads if wanted or _tiles(problem, heads) * 2 <= _tiles(problem, 1) else 1


def _tiles(problem: Problem, heads: int) -> int:
    """Query tiles of all heads of a batch entry."""
    rows = queries(problem) * slots(heads)
    return -(-rows // (ROWS if rows <= ROWS else 2 * ROWS)) * (problem.q_heads // heads)


def splits(problem: Problem, tiling: Tiling, target: Target) -> int:
    """Into how many parts the keys of a query tile are cut: as asked for, or so that the time below is least.

    Time is counted in kv tiles (1.5 µs): all rounds of blocks over the multiprocessors, each block its tiles and two
    more to begin and end; where there are parts, the kernel that combines them, and what passes through memory.
    """
    if problem.schedule.split_kv != "auto":
        return problem.schedule.split_kv
    work = -(-queries(problem) // tiling.queries) * (problem.q_heads // tiling.heads) * problem.batch
    tiles = -(-keys(problem) // tiling.tile_n)
    part = 8 * queries(problem) * problem.batch * problem.q_heads * tiling.dv / 5e6  # fp32, written and read

    def time(n: int) -> float:
        rounds = -(-work * n // target.sms)
        return rounds * (-(-tiles // n) + 2) + (0 if n == 1 else 3 + n * part)

    if work * tiles >= 0.9 * time(1) * target.sms:  # what no division goes below
        return 1
    best = min(range(1, max(1, min(MOST_SPLITS, tiles // 2)) + 1), key=time)
    return best if time(best) < 0.9 * time(1) else 1


def _whole_pages(tile_n: int) -> int:
    """Keys of a tile that are whole pages, or a part of one: pages are powers of two."""
    return 1 << tile_n.bit_length() - 1


def _by_registers(warpgroups: int, dv: int, program: Program) -> int:
    """Columns that fit a thread: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
    other = 30 if program.score is None and not reads_any(program.mask) else 36  # values on their way
    if has_opaque_test(program):
        other += 12  # of a test that is no bound: 25 spilled and read again with D 64 and 128 columns
    free = (160 if warpgroups == 3 else 240) - other - dv // 2
    return free * 4 // 3 // 16 * 16


def _by_memory(target: Target, tile_m: int, rows: int, keys: int) -> int:
    """Columns for which Q and O (`rows` wide) and two stages of K and V (`keys` wide) fit in shared memory."""
    free = target.shared_memory - 1024 - tile_m * rows * 2
    return free // (2 * 2 * keys) // 16 * 16
