"""What 8 bits cost in error, on a CPU: outputs of `ca.quantize` and `ca.attention` against fp64 of what was quantised.

    python benchmarks/eight_bits.py --out benchmarks/results/eight-bits/cpu.json
    python benchmarks/eight_bits.py --outliers 48 --out benchmarks/results/eight-bits/cpu-outliers.json
    python benchmarks/eight_bits.py --shares --out benchmarks/results/eight-bits/cpu-shares.json
    python benchmarks/eight_bits.py --kernels --out benchmarks/results/eight-bits/h200-errors.json      on a GPU

Draws: "outliers", N(0, 1) + N(0, 100)·Bernoulli(0.001), that of FlashAttention-3's test of accuracy; "normal"; "sink",
a first key that has 0.99 of each row; "deviation 6", scores that deviate by 6; "mean 1", V of mean 1; "shared
channels", keys that share a vector of N(0, 16).
The error is the root mean square of out - exact. P of "and P" is rounded to e4m3 too, as a kernel with products of 8
bits has it, with its largest at 2^8. "best of 4": `power_of_two=False`, the best of four scales. "q alone" and so on:
one of q, k, v and P has 8 bits, per head with Hadamard. "sums" are those of P·V, V of mean 1, in the 14 bits that
Hopper's unit keeps: relative error by keys, with sums moved to fp32 every 128 keys ("promoted") or never.
`--outliers N`: N draws of outliers alone, all with P rounded, each rotated in several ways; and as FlashAttention-3's
paper says that it rounds: by the largest number, rotated, of each block of 128 rows, and its baseline, of each tensor,
not rotated, whose P has fp16.
`--shares`: one key has a share of each row, the scores of all others are N(0, 1) or equal, in fp64 but for P in e4m3,
whose rows are divided by the sum of all P or by that of rounded P; errors over what `composattn.testing` takes.
`--kernels`: products of 8 bits on a GPU, as many queries as keys, against fp64 of the same 8-bit numbers. "kernel" is
what a call gets, "with LSE" the one that has no exponentials as logarithms, "P" attention in fp64 whose P is rounded to
e4m3, exactly, "rounding" what the output's type leaves, and "of the rule" the kernel's error over twice that of P and
this: 1 is the most that `composattn.testing` takes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

import composattn as ca  # noqa: E402
from benchmarks.accuracy import DRAWS, deviation  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.run import Row, save  # noqa: E402
from composattn.emulator.opcodes.operands import cut_sums  # noqa: E402
from composattn.mods import causal  # noqa: E402
from composattn.quantising import rotated, signs_of  # noqa: E402

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
HEADS, ROWS, DIM = 1, 256, 128
LENGTHS = 2048, 8192, 32768, 131072

WAYS: dict[str, dict[str, Any]] = {
    "per head": {"hadamard": False, "center": False},
    "per head, centered": {"hadamard": False},
    "per head, Hadamard, centered": {},
    "per block of 64, Hadamard, centered": {"scale": "block"},
    "per row, Hadamard, centered": {"scale": "token"},
    "per head, Hadamard, centered, best of 4": {"power_of_two": False},
    "per block of 64, Hadamard, centered, best of 4": {"scale": "block", "power_of_two": False},
    "per block of 128, Hadamard, centered, best of 4": {"scale": "block", "block": 128, "power_of_two": False},
    "per row, Hadamard, centered, best of 4": {"scale": "token", "power_of_two": False},
    "per head, Hadamard, centered, e5m2": {"dtype": torch.float8_e5m2},
}
DEFAULT_AND_BEST = [
    "per head, Hadamard, centered",
    *(f"per {kind}, Hadamard, centered, best of 4" for kind in ("head", "block of 128", "row")),
]
ROTATIONS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Keys, heads and dimension, the same of q, k and v."""

    keys: int
    rows: int = ROWS
    heads: int = HEADS
    dim: int = DIM


def drawn(name: str, sizes: Sizes, generator: torch.Generator) -> Inputs:
    keys, heads, dim = sizes.keys, sizes.heads, sizes.dim
    draw = DRAWS[name != "outliers"]
    q, k, v = (draw((1, heads, n, dim), generator) for n in (sizes.rows, keys, keys))
    if name == "sink":  # in a channel of its own, so that its score is log(99 Σ exp) of the others in every row
        q[..., 0], k[..., 0], k[:, :, 0] = 4.0, 0.0, 0.0
        k[:, :, 0, 0] = (math.log(99 * keys) + 0.5) * dim**0.5 / 4
    if name == "deviation 6":
        q = 6 * q
    if name == "mean 1":
        v = v + 1
    if name == "shared channels":
        k = k + 4 * torch.randn((1, heads, 1, dim), generator=generator, device=generator.device)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def rounded_p(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q·k)·v in the type of these, P rounded to e4m3; `hidden`: of which pairs it is 0."""
    scores = scores_of(q, k) if hidden is None else scores_of(q, k).masked_fill(hidden, -torch.inf)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * 256
    return p.float().to(torch.float8_e4m3fn).to(v.dtype) @ v / p.sum(-1, keepdim=True)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs where one of q, k, v and P has 8 bits, and the others fp64."""
    wide = {"q": q.double(), "k": k.double(), "v": v.double()}
    signs = signs_of(DIM, q.device)
    wide |= {name: rotated(wide[name], signs) for name in ("q", "k")}
    made = ca.quantize(q, k, v, center=False)
    narrow = {name: of.dequantised(torch.float64) for name, of in zip("qkv", made, strict=True)}
    found = {name: attended(**{**wide, name: narrow[name]}) for name in "qkv"}
    return {**found, "P": rounded_p(**wide)}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q·k)·v as it is, in fp64."""
    return torch.softmax(scores_of(q, k), -1) @ v


def errors(name: str, keys: int, seeds: int) -> list[Row]:
    """A row for each way to quantise; beside it 16-bit q with k and v of 8 bits, and attention in bf16."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        given = drawn(name, Sizes(keys), seeded(seed))
        exact = attended(*(x.double() for x in given))

        def keep(way: str, out: torch.Tensor, exact: torch.Tensor = exact) -> None:
            found.setdefault(way, []).append(deviation(out, exact))

        keep("bf16", ca.attention(*given))
        for way, how in WAYS.items():
            made = ca.quantize(*given, **how)
            keep(way, ca.attention(*made))
            q, k, v = (x.dequantised(torch.float64) for x in made)
            keep(f"{way}, and P", rounded_p(q, k, v))  # k's mean stays out: the softmax does not see it
            if not how.get("hadamard", True):
                keep(f"{way}, q of 16 bits", ca.attention(given[0], *made[1:]))
        for part, out in alone(*given).items():
            keep(f"{part} alone", out)
        keep("size", torch.zeros_like(exact))
    return [
        {
            "row": f"D{DIM} {keys} keys {name}",
            "impl": way,
            "rmse": mean_square(of),
            "of_seeds": of,
        }
        for way, of in found.items()
    ]


def by_largest(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x (..., S, D) rounded to e4m3, the largest of each `rows` rows to 448."""
    blocks = x.unflatten(-2, (-1, rows))
    scale = blocks.abs().amax((-1, -2), keepdim=True) / 448
    return (blocks / scale).to(torch.float8_e4m3fn).to(x.dtype).mul(scale).flatten(-3, -2)


def as_the_paper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By blocks, q and k rotated."""
    q, k = (rotated(x, signs_of(DIM, x.device)) for x in (q, k))
    return rounded_p(*(by_largest(x, 128) for x in (q, k, v)))


def as_its_baseline(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By tensors, not rotated, P in fp16."""
    q, k, v = (by_largest(x, x.shape[-2]) for x in (q, k, v))
    scores = q @ k.mT * DIM**-0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return p.half().to(v.dtype) @ v / p.sum(-1, keepdim=True)


def of_outliers(keys: int, draws: int) -> list[Row]:
    """A row for each of `DEFAULT_AND_BEST`, P rounded, of many draws, each rotated `ROTATIONS` times.

    In fp32, whose error is a thousandth of theirs. Of one draw, how its numbers happen to round says more than the way
    does: signs of channels, which leave q·k and the draw's distribution as they are, round them anew. "of_seeds" are
    means over these.
    """
    found: dict[str, list[float]] = {}
    for seed in range(draws):
        q, k, v = drawn("outliers", Sizes(keys), seeded(seed))
        exact = attended(*(x.float() for x in (q, k, v)))
        found.setdefault("size", []).append(deviation(torch.zeros_like(exact), exact))
        rounds_anew = torch.Generator().manual_seed(seed)
        signs = 1 - 2 * torch.randint(0, 2, (1, ROTATIONS, 1, DIM), generator=rounds_anew)
        for name in DEFAULT_AND_BEST:
            made = ca.quantize(q * signs, k * signs, v, **WAYS[name])  # a head each
            out = rounded_p(*(x.dequantised(torch.float32) for x in made))
            found.setdefault(name, []).append(deviation(out, exact.expand_as(out)))
        wide = q.float(), k.float(), v.float()
        out = as_the_paper(wide[0] * signs, wide[1] * signs, wide[2])
        found.setdefault("the paper's", []).append(deviation(out, exact.expand_as(out)))
        found.setdefault("the paper's baseline", []).append(deviation(as_its_baseline(*wide), exact))
        v_alone = attended(q.float(), k.float(), ca.quantize(q, k, v).v.dequantised(torch.float32))
        found.setdefault("v alone", []).append(deviation(v_alone, exact))
    row = f"D{DIM} {keys} keys outliers, {draws} draws, {ROTATIONS} rotations"
    return [
        {"row": row, "impl": name, "rmse": mean_square(of), "standard_error": standard_error(of), "of_seeds": of}
        for name, of in found.items()
    ]


def standard_error(errors: list[float]) -> float:
    """The standard error of `mean_square`."""
    squares = [e * e for e in errors]
    return float(statistics.stdev(squares) / len(squares) ** 0.5 / 2 / mean_square(errors)) if len(errors) > 1 else 0.0


def mean_square(errors: list[float]) -> float:
    """The root of it."""
    return float((sum(e * e for e in errors) / len(errors)) ** 0.5)


def sums(keys: int) -> list[Row]:
    """P·V as Hopper's unit sums it, with and without promotion."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(16, keys, generator=generator)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).mul(256).to(torch.float8_e4m3fn).float().numpy()
    v = (torch.randn(16, keys, generator=generator) + 1).to(torch.float8_e4m3fn).float().numpy()
    exact = p.astype(np.float64) @ v.astype(np.float64).T
    rows: list[Row] = []
    for name, period in (("never promoted", keys), ("promoted each 1,024 keys", 1024), ("promoted each 128 keys", 128)):
        total = np.zeros(exact.shape, np.float32)
        for k in range(0, keys, period):
            total += cut_sums(np.zeros_like(total), p[:, k : k + period], v[:, k : k + period])
        error = float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
        rows.append({"row": f"sums of {keys} keys, V of mean 1", "impl": name, "relative": error})
    return rows


KERNELS_DIMS = 64, 128
KERNELS_DRAWS = "normal", "outliers", "deviation 6", "mean 1", "sink"
CHECKED = 512  # rows of queries, at equal distances
LEAST_TILES = 640  # of 128 queries: some for each multiprocessor, so that no keys are split
HEADS_CHECKED = 4


def of_shares(share: float, keys: int, spread: float = 1.0) -> list[Row]:
    """What rows lose that are divided by sums of rounded P, where one key has a share of each."""
    generator = seeded(keys)
    weights = (spread * torch.randn(64, keys, generator=generator, dtype=torch.float64)).exp()
    weights[:, 0] = weights[:, 1:].sum(1) * share / (1 - share)
    values = torch.randn(keys, 64, generator=generator).to(torch.float8_e4m3fn).double()
    p = weights / weights.amax(1, keepdim=True) * 2**8
    rounded = p.float().to(torch.float8_e4m3fn).double()
    exact = (p / p.sum(1, keepdim=True)) @ values
    by_all, by_rounded = (rounded @ values / divisor.sum(1, keepdim=True) for divisor in (p, rounded))
    most = 2 * deviation(by_all, exact) + deviation(exact.bfloat16(), exact)
    outs = {"all P": by_all, "rounded P": by_rounded}
    row = f"{keys} keys, one has {share}{'' if spread else ', others equal'}"
    return [
        {"row": row, "impl": f"by {name}", "ratio": deviation(out.bfloat16(), exact) / most}
        for name, out in outs.items()
    ]


def of_kernels(name: str, keys: int, dim: int, masked: bool) -> list[Row]:
    """Errors of rows of products of 8 bits on a GPU, see above; "size" is the root mean square of the exact output."""
    heads = max(HEADS_CHECKED, LEAST_TILES * 128 // keys)
    sizes = Sizes(keys, keys, heads, dim)
    given = [x.to(torch.float8_e4m3fn) for x in drawn(name, sizes, torch.Generator("cuda").manual_seed(0))]
    how: dict[str, Any] = {"mask_mod": causal() if masked else None, "out_dtype": torch.bfloat16}
    rows = torch.arange(keys // CHECKED - 1, keys, keys // CHECKED, device="cuda")
    kernels = {"kernel": ca.attention(*given, **how), "with LSE": ca.attention(*given, **how, return_lse=True)[0]}
    found: dict[str, list[float]] = {}
    for head in range(HEADS_CHECKED):
        q, k, v = (x[:, head].double() for x in given)
        q, hidden = q[:, rows], torch.arange(keys, device="cuda") > rows[:, None] if masked else None
        scores = scores_of(q, k) if hidden is None else scores_of(q, k).masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        exact = weights @ v
        outs = {way: out[:, head, rows] for way, out in kernels.items()}
        outs |= {"P": rounded_p(q, k, v, hidden), "rounding": exact.bfloat16(), "size": torch.zeros_like(exact)}
        for way, out in outs.items():
            found.setdefault(way, []).append(deviation(out, exact))
        found.setdefault("share of the first key", []).append(float(weights[..., 0].mean()))
    means = {way: mean_square(of) for way, of in found.items()}
    means["of the rule"] = means["kernel"] / (2 * means["P"] + means["rounding"])
    row = f"D{dim} {keys} keys {'causal' if masked else 'full'} {name}"
    return [{"row": row, "impl": way, "rmse" if way in found else "ratio": x} for way, x in means.items()]


def compiled(dim: int, masked: bool, keys: int) -> None:
    """The kernels of a row of `of_kernels`, kept on disk, by a process of its own."""
    given = [torch.zeros(1, LEAST_TILES, keys, dim, device="cuda").to(torch.float8_e4m3fn) for _ in range(3)]
    how: dict[str, Any] = {"mask_mod": causal() if masked else None, "out_dtype": torch.bfloat16}
    for lse in (False, True):
        ca.attention(*given, **how, return_lse=lse)


def tables(rows: list[Row]) -> tuple[str, str]:
    """Errors by draw and way, and errors of sums, as the page "8 bits" shows them."""
    by_row: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_row.setdefault(row["row"], {})[row["impl"]] = row.get("rmse", row.get("relative"))
    draws = {name.split(" keys ")[1]: of for name, of in by_row.items() if not name.startswith("sums")}
    sums = {name.removeprefix("sums of ").split(",")[0]: of for name, of in by_row.items() if name.startswith("sums")}
    ways = ["size", "bf16", *WAYS, "per head, q of 16 bits", "per head, Hadamard, centered, and P"]
    ways += ["per row, Hadamard, centered, best of 4, and P", *(f"{part} alone" for part in "qkvP")]
    first = ["| | " + " | ".join(draws) + " |", "|---|" + "---|" * len(draws)]
    first += [f"| {way} | " + " | ".join(f"{of[way]:.1e}" for of in draws.values()) + " |" for way in ways]
    ways = list(next(iter(sums.values())))
    second = ["| | " + " | ".join(sums) + " |", "|---|" + "---|" * len(sums)]
    second += [f"| {way} | " + " | ".join(f"{of[way]:.2%}" for of in sums.values()) + " |" for way in ways]
    return "\n".join(first), "\n".join(second)


def cpu_jobs(options: argparse.Namespace) -> Iterator[Callable[[], list[Row]]]:
    """Each gives rows."""
    if options.shares:
        for share, power in itertools.product((0.9, 0.99), range(10, 18)):
            yield functools.partial(of_shares, share, 2**power)
        for keys in (128, 1024, 8192):
            yield functools.partial(of_shares, 0.3, keys, 0.0)
        return
    if options.outliers:
        yield functools.partial(of_outliers, options.keys, options.outliers)
        return
    for name in ("outliers", "normal", "sink", "deviation 6", "mean 1", "shared channels"):
        # a few outliers in scores decide the error of a draw: one seed says 7.1e-3, another 1.0e-2
        yield functools.partial(errors, name, options.keys, options.seeds * (6 if name == "outliers" else 1))
    for keys in LENGTHS:
        yield functools.partial(sums, keys)


def kernel_jobs() -> Iterator[Callable[[], list[Row]]]:
    """Each gives rows; kernels are compiled before, side by side."""
    forms = list(itertools.product(KERNELS_DIMS, (False, True)))
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        every = [(*form, keys) for form in forms for keys in LENGTHS[:3]]
        list(pool.map(compiled, *zip(*every, strict=True)))
    for keys, (dim, masked), name in itertools.product(LENGTHS, forms, KERNELS_DRAWS):
        yield functools.partial(of_kernels, name, keys, dim, masked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--outliers", type=int, default=0, metavar="N", help="N draws of outliers, nothing else")
    parser.add_argument("--shares", action="store_true", help="one key with much of each row, nothing else")
    parser.add_argument("--kernels", action="store_true", help="those of a GPU, nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if options.kernels else "cpu")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for job in kernel_jobs() if options.kernels else cpu_jobs(options):
        for row in job():
            print(*row.values(), flush=True)
            result["rows"].append(row)
        save(result, options.out)


if __name__ == "__main__":
    main()
