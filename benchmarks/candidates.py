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

import torch

from benchmarks.cases import Case, Direction, Pattern
from benchmarks.implementations import Composattn, Implementation, Inputs, Job, NotServed
from composattn.analysis.program import Program
from composattn.backends.fused.planning.call_class import CallClass
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import HOPPER, Target
from composattn.backends.fused.tiles.traits import padded
from composattn.backends.hopper import backward_choice
from composattn.backends.hopper.backward_choice import backward_tiling
from composattn.backends.hopper.backward_keys_apart import KeysApart
from composattn.backends.hopper.forward_choice import forward_class, forward_tiling, tiling_of_form
from composattn.backends.hopper.forward_table import FORMS, Form, serves
from composattn.call.problem import Problem
from composattn.mods.mask import Mask
from composattn.mods.score import Score

Choose = Callable[..., Any]


def _widest(problem: Problem) -> int:
    return max(padded(problem.head_dim), padded(problem.head_dim_v))


def class_of_case(case: Case) -> CallClass:
    """What kind of call the forward of a dense case is."""
    pattern = case.pattern(case, torch.device("cpu"))
    score, mask = pattern.score_mod, pattern.mask_mod
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    problem = Problem(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, case.dtype,
        torch.device("cpu"),
    )  # fmt: skip
    return forward_class(problem, program, HOPPER)


def _of_form(form: Form) -> Choose:
    """The forward of a call by a form of the table, whatever row is its."""

    def choose(problem: Problem, program: Program, target: Target) -> Any:
        call = forward_class(problem, program, target)
        return tiling_of_form(form, problem, program, target) if serves(form, call) else None

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
    facts = {"tall": rows == 128, "wide": rows == 80}

    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        d = padded(problem.head_dim)
        fits = {128: _widest(problem) <= 64, 80: d == 128, 64: True}
        return _by_facts(**facts, way={})(problem, program, target, deterministic) if fits[rows] else None

    return choose


def _of_shared_keys(exchanges: bool) -> Choose:
    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        if not 128 < _widest(problem) <= 256:
            return None
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        if exchanges and (d, dv) not in ((160, 160), (192, 128), (192, 192), (256, 256)):
            return None
        with mock.patch.object(backward_choice, "_exchanges", lambda *_: exchanges):
            return backward_tiling(problem, program, target, deterministic)

    return choose


CANDIDATES: dict[Direction, dict[str, Choose]] = {
    "forward": {str(form): _of_form(form) for form in FORMS},
    "backward": {
        "64 queries": _tile_of(64),
        "80 queries": _tile_of(80),
        "128 queries": _tile_of(128),
        "a block a tile": _each_block,
        "plain dQ": _by_facts(way={}),
        "no short rows": _by_facts(short_rows=0),
        "no halves": _by_facts(halves=False),
        "dQ from registers": _by_facts(sends=False, wide=False),
        "shared keys": _of_shared_keys(False),
        "exchange": _of_shared_keys(True),
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
        job = self.of.prepare(case, pattern, inputs)
        with cut_by(case.direction, self.text):
            out = job.forward(*job.leaves)  # plans are kept, so later calls are cut so too
            if case.direction == "backward":
                torch.autograd.grad(out, (*job.leaves, *job.learned), job.grad)
        return job
