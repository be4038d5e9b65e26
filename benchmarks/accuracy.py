"""How far outputs are from fp64 where inputs have outliers: ours and the peers', on the same draws.

    python benchmarks/accuracy.py --out benchmarks/results/h200-accuracy.json

q, k and v are N(0, 1) + N(0, 100) · Bernoulli(0.001), as in FlashAttention-3's test of accuracy, and N(0, 1) beside it.
The error of an output is its root mean square deviation, over all elements of all seeds, from attention in fp64 of the
same rounded inputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

from benchmarks.cases import Case, Pattern, causal, full  # noqa: E402
from benchmarks.check import WrongResult, dense_rows  # noqa: E402
from benchmarks.implementations import Implementation, Inputs, available  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.run import Row, error_row, save  # noqa: E402

SHARE, SIZE = 0.001, 10.0  # of the outliers: how many there are, and their standard deviation
ROWS = 512  # of queries that fp64 has at a time
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))


@dataclass(frozen=True)
class Draw:
    """What inputs are drawn from."""

    name: str
    share: float = 0.0

    def __call__(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        device = generator.device
        common = torch.randn(shape, generator=generator, device=device)
        rare = torch.rand(shape, generator=generator, device=device) < self.share
        return common + torch.where(rare, SIZE * torch.randn(shape, generator=generator, device=device), 0.0)


DRAWS = (Draw("outliers", SHARE), Draw("normal"))


def cases(lengths: list[int]) -> Iterator[Case]:
    for (d, dv), length in ((dims, length) for dims in DIMS for length in lengths):
        for pattern in (full, causal):
            named = f"D{d}" if d == dv else f"D{d}/{dv}"
            name = f"{named} S{length} {pattern.__name__}"
            yield Case(name, (), pattern, batch=1, heads=4, q_len=length, dim=d, v_dim=dv)


def truth(case: Case, pattern: Pattern, inputs: Inputs) -> torch.Tensor:
    """(B, H, S, Dv) in fp64, by blocks of rows."""
    wide = [t.double() for t in (inputs.q, inputs.k, inputs.v)]
    parts = []
    for rows in torch.arange(case.q_len, device=inputs.q.device).split(ROWS):
        parts.append(dense_rows(case, pattern, wide[0][:, :, rows], wide[1], wide[2], rows, 0))
    return torch.cat(parts, dim=2)


def deviation(got: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square."""
    return float((got.double() - true).square().mean().sqrt())


def rows_of(case: Case, draw: Draw, who: list[Implementation], seeds: int, device: torch.device) -> list[Row]:
    """A row for each implementation; one that fails on a draw has no error, as others' are of all draws."""
    pattern = case.pattern(case, device)
    named = dataclasses.replace(case, name=f"{case.name}, {draw.name}")
    found: dict[str, list[float]] = {one.name: [] for one in who}
    failed: dict[str, Row] = {}
    for seed in range(seeds):
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(case.batch, case.heads, case.q_len, d) for d in (case.dim, case.dim, case.v_dim)]
        q, k, v = (draw(shape, generator).to(case.dtype) for shape in shapes)
        inputs = Inputs(q, k, v, torch.zeros_like(v))
        true = truth(case, pattern, inputs)
        for one in who:
            if one.name in failed:
                continue
            try:
                job = one.prepare(case, pattern, inputs)
                with torch.no_grad():
                    error = deviation(job.to_common(job.forward(*job.leaves)), true)
                if not math.isfinite(error):
                    raise WrongResult("output: not finite")
                found[one.name].append(error)
            except Exception as error:  # peers raise what they like
                failed[one.name] = error_row(named, one.name, error)
    return [failed.get(name) or _row(named, name, errors) for name, errors in found.items()]


def _row(case: Case, name: str, errors: list[float]) -> Row:
    whole = statistics.fmean(e * e for e in errors) ** 0.5
    return {"row": case.name, "impl": name, "rmse": whole, "of_seeds": errors}


def shown(rows: list[Row], peer: str) -> str:
    """Each error, in brackets of the peer's."""
    by_name = {row["impl"]: row["rmse"] for row in rows if "rmse" in row}
    of = by_name.get(peer)
    ratios = {name: "" if of is None else f" ({rmse / of:.3f})" for name, rmse in by_name.items()}
    return ", ".join(f"{name} {rmse:.3e}{ratios[name]}" for name, rmse in by_name.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="", help="regular expression on names such as `D64 S2048 full`")
    parser.add_argument("--impl", nargs="+", default=["composattn", "flash-attn-4", "torch cuDNN"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer", default="flash-attn-4", help="whose error is beside each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    who = [one for one in available(device) if one.name in options.impl]
    if not who:
        parser.error(f"none of {options.impl} is here; there are {[one.name for one in available(device)]}")
    result: dict[str, Any] = {**provenance(device), "rows": []}
    for case in cases(options.lengths):
        for draw in DRAWS if re.search(options.cases, case.name) else ():
            rows = rows_of(case, draw, who, options.seeds, device)
            print(f"{rows[0]['row']}: {shown(rows, options.peer)}", flush=True)
            result["rows"] += rows
            save(result, options.out)


if __name__ == "__main__":
    main()
