"""What benchmarks of tilings of warps share: their calls, rows beside FlashAttention-2, and options."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from benchmarks.kernel_cases import by_call, compile_first
from benchmarks.timing import Call, Stopwatch, interleaved
from composattn.analysis.program import Program
from composattn.call.problem import Problem
from composattn.mods import causal

TOKENS = 16384
HEADS = {64: 32, 96: 16, 128: 16, 192: 8, 256: 8}
FLASH = "FlashAttention-2"
CHOSEN = "chosen"
Shape = TypeVar("Shape")


@dataclasses.dataclass(frozen=True)
class WarpCase(Generic[Shape]):
    """A call of `TOKENS` tokens, and one of the tilings of its D; None: the one that calls get."""

    dim: int
    length: int
    masked: bool
    shape: Shape | None
    group: int = 1
    direction: ClassVar[str] = ""  # a word of its name, with a space behind it
    products: ClassVar[int] = 2  # of matrices

    @property
    def name(self) -> str:
        return CHOSEN if self.shape is None else str(self.shape)

    @property
    def text(self) -> str:
        of_heads = f" {self.group} heads a group" if self.group > 1 else ""
        return f"{self.direction}D{self.dim} S{self.length} {'causal' if self.masked else 'full'}{of_heads}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, query heads, key/value heads."""
        heads = HEADS[self.dim]
        return max(1, TOKENS // self.length), heads, heads // self.group

    @property
    def flops(self) -> float:
        batch, heads, _ = self.sizes
        return 2 * self.products * batch * heads * self.length**2 * (0.5 if self.masked else 1.0) * self.dim

    @property
    def problem(self) -> Problem:
        sizes = (*self.sizes, self.length, self.length, self.dim, self.dim)
        return Problem(*sizes, torch.bfloat16, torch.device("cuda"))

    @property
    def program(self) -> Program:
        return Program(None, causal().expr if self.masked else None)


Of = TypeVar("Of", bound=WarpCase[Any])


def beside_flash(
    case: Of, calls: Mapping[str, Call], errors: Mapping[str, float], rounds: int, error: str
) -> Iterator[dict[str, Any]]:
    """Rows of one call's tilings in turns with FlashAttention-2, which is one of `calls`; `error`: what errors are."""
    timings = interleaved(dict(calls), Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=6.0, limit_s=30.0)
    for name, timing in sorted(timings.items(), key=lambda item: item[1].ms):
        ratio = timings[FLASH].ms / timing.ms
        row = {"call": case.text, "name": name, "tflops": round(case.flops / timing.ms / 1e9, 1), "ms": timing.ms}
        row |= {"spread": round(timing.spread, 4), error: errors[name], "of flash": round(ratio, 3)}
        steady = f"spread {timing.spread:.1%}, {error} {errors[name]:.1e}"
        print(f"{row['call']}: {row['tflops']:4.0f} TFLOP/s, {ratio:.3f} of {FLASH}'s ({steady}): {name}", flush=True)
        yield row


def options_of(words: str | None, lengths: str) -> argparse.ArgumentParser:
    """The options of such a benchmark; `lengths`: those that it takes if nobody says."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="64,96,128,192,256")
    parser.add_argument("--lengths", default=lengths)
    parser.add_argument("--masks", default="full,causal")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser


def cases_of(kind: Callable[..., Of], candidates: Mapping[int, tuple[Any, ...]], given: argparse.Namespace) -> list[Of]:
    """The cases that are asked for: all candidates of each call, or what calls get, with grouped heads too."""
    dims, lengths = ([int(n) for n in text.split(",")] for text in (given.dims, given.lengths))
    calls = [(d, n, mask == "causal") for d in dims for n in lengths for mask in given.masks.split(",")]
    if given.chosen:
        return [kind(*call, None, group) for call in calls for group in (1, 4)]
    return [kind(*call, shape) for call in calls for shape in candidates[call[0]]]


def rows_of(
    every: list[Of],
    compiled: Callable[[Of], str],
    kept: Callable[[Of], str],
    measured: Callable[[list[Of], int], Iterator[dict[str, Any]]],
    given: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Compiles each tiling once, side by side, then measures each call; with `dry` it compiles alone."""
    once = list({(c.dim, c.masked, c.group, c.shape): c for c in every}.values())
    compile_first(compiled if given.dry else kept, once, given.workers)
    return [row for group in ([] if given.dry else by_call(every)) for row in measured(group, given.rounds)]
