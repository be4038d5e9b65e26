"""Other ways to cut a Hopper call than the one that is chosen, by name: what a choice is compared with.

A candidate is asked for the tiling of a call. It answers None where it has none for such a call, or where its tiling is
one that another candidate has too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.cases import Case, Direction, Pattern
from benchmarks.implementations import Composattn, Implementation, Inputs, Job, NotServed
from composattn.analysis.program import Program
from composattn.backends.fused.architecture import ARCHITECTURES
from composattn.backends.fused.few_queries import packed_heads
from composattn.backends.fused.target import Target
from composattn.backends.fused.tiling import slots
from composattn.backends.fused.traits import padded, queries
from composattn.backends.hopper import backward_choice, large_blocks
from composattn.backends.hopper.backward_choice import backward_tiling
from composattn.backends.hopper.backward_keys_apart import KeysApart
from composattn.backends.hopper.forward_choice import forward_tiling
from composattn.backends.hopper.small_blocks import alone, small
from composattn.backends.hopper.tiling import ROWS
from composattn.call.problem import Problem

Choose = Callable[..., Any]


def _few(problem: Problem, program: Program) -> bool:
    return queries(problem) * slots(packed_heads(problem, program, ROWS)) <= ROWS


def _widest(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def _small(problem: Problem, program: Program, target: Target) -> Any:
    if _few(problem, program) or _widest(problem) > 128:
        return None
    return small(problem, program, target, packed_heads(problem, program, ROWS))


def _alone(problem: Problem, program: Program, target: Target) -> Any:
    if _few(problem, program) or _widest(problem) > 256 or not problem.layout.is_dense:
        return None
    return alone(problem, program, target, packed_heads(problem, program, ROWS))


def _large(guesses: bool, stays: bool) -> Choose:
    def choose(problem: Problem, program: Program, target: Target) -> Any:
        if _few(problem, program) or _widest(problem) > 256:
            return None
        if guesses and (program.keep is not None or _widest(problem) > 128):
            return None
        asked = dataclasses.replace(problem, schedule=dataclasses.replace(problem.schedule, persistent=stays))
        with mock.patch.object(large_blocks, "rows_guess", lambda *_: guesses):
            return large_blocks.large(asked, program, target, packed_heads(problem, program, ROWS))

    return choose


def _by_facts(**facts: Any) -> Choose:
    """The backward of a call of which these facts are said to be so."""

    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        if _widest(problem) > 128:
            return None
        call = KeysApart(problem, program, target, deterministic)
        call.__dict__.update(facts)
        return call.tiling

    return choose


def _each_block(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
    if _widest(problem) > 128:
        return None
    call = KeysApart(problem, program, target, deterministic)
    call.__dict__["_without_held"] = call._each_block
    return call.tiling


def _tile_of(rows: int) -> Choose:
    facts = {"tall": rows == 128, "wide": rows == 80, "thirds": rows == 96}

    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        d = padded(problem.head_dim)
        fits = {128: _widest(problem) <= 64, 80: d == 128, 96: d == 96 and padded(problem.head_dim_v) <= d, 64: True}
        return _by_facts(**facts, way={})(problem, program, target, deterministic) if fits[rows] else None

    return choose


def _of_shared_keys(exchanges: bool, transposed: bool) -> Choose:
    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        if not 128 < _widest(problem) <= 256:
            return None
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        if exchanges and (d, dv) not in ((192, 128), (192, 192), (256, 256)):
            return None
        if transposed and not (d == 192 and dv in (128, 192)):
            return None
        with (
            mock.patch.object(backward_choice, "_exchanges", lambda *_: exchanges),
            mock.patch.object(backward_choice, "_takes_more_keys", lambda *_: transposed),
        ):
            return backward_tiling(problem, program, target, deterministic)

    return choose


CANDIDATES: dict[Direction, dict[str, Choose]] = {
    "forward": {
        "small": _small,
        "large": _large(False, False),
        "large, stays": _large(False, True),
        "large, guesses": _large(True, False),
        "large, guesses, stays": _large(True, True),
        "alone": _alone,
    },
    "backward": {
        "64 queries": _tile_of(64),
        "80 queries": _tile_of(80),
        "96 queries": _tile_of(96),
        "128 queries": _tile_of(128),
        "a block a tile": _each_block,
        "no rounds": _by_facts(rounds=False),
        "plain dQ": _by_facts(way={}),
        "no short rows": _by_facts(short_rows=0),
        "no halves": _by_facts(halves=False),
        "dQ from registers": _by_facts(sends=False, wide=False, thirds=False),
        "shared keys": _of_shared_keys(False, False),
        "exchange": _of_shared_keys(True, False),
        "transposed": _of_shared_keys(False, True),
    },
}
NAMES = {name for candidates in CANDIDATES.values() for name in candidates}
_CHOSEN: dict[Direction, Choose] = {"forward": forward_tiling, "backward": backward_tiling}


@contextlib.contextmanager
def cut_by(direction: Direction, name: str) -> Iterator[None]:
    """Inside, calls are cut as the candidate says; raises `NotServed` there where it has no tiling of its own."""
    before = dict(ARCHITECTURES)

    def choose(*call: Any) -> Any:
        taken = [_CHOSEN[direction](*call)]
        for other, candidate in CANDIDATES[direction].items():
            try:
                tiling = candidate(*call)
            except (AssertionError, ValueError):  # fields that exclude each other
                tiling = None
            if other == name:
                if tiling is None or tiling in taken:
                    raise NotServed("no tiling of its own")
                return tiling
            taken.append(tiling)
        raise KeyError(name)

    fields: dict[str, Any] = {f"{direction}_tiling": choose}
    ARCHITECTURES["hopper"] = dataclasses.replace(before["hopper"], **fields)
    try:
        yield
    finally:
        ARCHITECTURES.update(before)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """This package, cut as one of them says."""

    text: str
    of: Implementation = dataclasses.field(default_factory=Composattn)

    @property
    def name(self) -> str:
        return self.text

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        import torch

        job = self.of.prepare(case, pattern, inputs)
        with cut_by(case.direction, self.text):
            out = job.forward(*job.leaves)  # plans are kept, so later calls are cut so too
            if case.direction == "backward":
                torch.autograd.grad(out, (*job.leaves, *job.learned), job.grad)
        return job
