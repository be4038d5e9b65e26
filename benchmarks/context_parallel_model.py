"""Context parallel on paper: areas, bytes and times for any number of ranks, with no GPU and no process group.

    python -m benchmarks.context_parallel_model --ranks 64 512 --tokens-a-rank 16384

The division and the rows that move are those that `ca.ContextParallel` plans, exactly. Times are a model:

    computing   FLOP of the rank with the most pairs, forward and backward, at --tflops
    fetching    bytes that the busiest rank receives in both, those from ranks of its own node at --inside GB/s, the
                others at --between GB/s; no latency, no congestion
    step        with two parts what is longer, for the fetch runs beside the computation; with one their sum

What the table leaves out: imbalance between kernels of one rank, host time, memory traffic of packing and adding rows.
The defaults are what one H200 computed in our forward and backward together, NVLink inside a node of 8, and 400 Gb/s
per GPU between nodes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch

from composattn.mods import causal, document, sliding_window
from composattn.mods.mask import Mask
from composattn.parallel.division import Division, divide
from composattn.parallel.traffic import TensorSizes, received_by_heads
from composattn.parallel.visits import grain_for, tile_for, visits_of


@dataclass(frozen=True)
class Assumed:
    """FLOP per second of a rank, bytes per second that it receives inside a node and between nodes, ranks of a node."""

    flops: float
    inside: float
    between: float
    node: int


def masks(tokens: int, seed: int = 0) -> dict[str, Mask]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(max(8, tokens // 4096), generator=generator).mul(1.0).exp()
    ends = (weights.cumsum(0) / weights.sum() * tokens).long()
    ids = torch.searchsorted(ends, torch.arange(tokens), right=True).clamp(max=len(weights) - 1).int()
    return {
        "causal": causal(),
        "window 4096": causal() & sliding_window(4096),
        f"{len(weights)} documents": causal() & document(ids),
    }


def busiest(division: Division, node: int) -> tuple[int, int]:
    """Rows that the rank which fetches most gets from its own node, and from others."""
    rank = max(range(division.ranks), key=division.fetched.__getitem__)
    wanted = division.needs(rank, division.visits.seen) & ~division.owns(rank)
    first = rank // node * node
    near = sum(int((wanted & division.owns(r)).sum()) for r in range(first, min(first + node, division.ranks)))
    grain = division.visits.grain
    return near * grain, (int(wanted.sum()) - near) * grain


def row(name: str, mask: Mask, ranks: int, tokens: int, shape: TensorSizes, assumed: Assumed) -> str:
    begin = time.perf_counter()
    tile = tile_for(tokens, ranks)
    visits = visits_of(mask.expr, tokens, tile, grain_for(tokens, tile))
    division = divide(visits, ranks)
    planned = time.perf_counter() - begin
    computing = 3.5 * shape.flops(max(division.pairs) * shape.heads) / assumed.flops
    near, far = (2 * rows * shape.kv_row for rows in busiest(division, assumed.node))
    fetching = near / assumed.inside + far / assumed.between
    gathered = 2 * (tokens - tokens // ranks) * shape.kv_row
    by_heads = 2 * received_by_heads(division, shape) if shape.kv_heads % ranks == 0 else None
    moved = "–" if by_heads is None else f"{by_heads / 2**20:,.0f}"
    ideal = 3.5 * shape.flops(sum(division.pairs) / ranks * shape.heads) / assumed.flops
    return (
        f"| {ranks} | {name} | {tokens:,} | {division.imbalance:.1%} | {(near + far) / 2**20:,.0f} | "
        f"{gathered / 2**20:,.0f} | {moved} | "
        f"{computing * 1e3:.1f} | {fetching * 1e3:.1f} | "
        f"{ideal / max(computing, fetching):.2f} | {ideal / (computing + fetching):.2f} | "
        f"{planned:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--tokens-a-rank", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tflops", type=float, default=550)
    parser.add_argument("--inside", type=float, default=350, help="GB/s that a rank receives inside of a node")
    parser.add_argument("--between", type=float, default=45, help="GB/s that a rank receives from other nodes")
    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    given = parser.parse_args()
    assumed = Assumed(given.tflops * 1e12, given.inside * 1e9, given.between * 1e9, given.node)
    shape = TensorSizes(1, given.heads, given.kv_heads)
    print("| ranks | mask | tokens | imbalance | MiB fetched | all keys, MiB | heads, MiB | computing, ms | "
          "fetching, ms | of linear, 2 parts | 1 part | planned in, s |")  # fmt: skip
    print("|" + "---|" * 12)
    for ranks in given.ranks:
        tokens = ranks * given.tokens_a_rank
        for name, mask in masks(tokens).items():
            print(row(name, mask, ranks, tokens, shape, assumed), flush=True)


if __name__ == "__main__":
    main()
