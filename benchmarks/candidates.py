"""Other ways to cut a Hopper call than the one that is chosen, by name: what a choice is compared with.

A candidate is asked for the tiling of a call. It answers None where it has none for such a call, or where its tiling is
one that another candidate has too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.cases import Case, Direction, Pattern
from benchmarks.implementations import Composattn, Implementation, Inputs, Job, NotServed
from composattn.analysis.captured_gradient import GradientProgram, fused_reads
from composattn.analysis.program import Program
from composattn.backends.fused.planning.facts import Facts
from composattn.backends.fused.planning.tables import first
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import HOPPER, Target
from composattn.backends.fused.tiles.tiling import Chosen
from composattn.backends.hopper.backward_choice import FORMS as BACKWARD_FORMS
from composattn.backends.hopper.backward_choice import backward_facts, choose_backward
from composattn.backends.hopper.backward_choice import serves as backward_serves
from composattn.backends.hopper.backward_choice import tiling_of_form as backward_of_form
from composattn.backends.hopper.backward_tiling import TABLES as BACKWARDS
from composattn.backends.hopper.forward_choice import (
    FORMS,
    choose_forward,
    forward_facts,
    serves,
    tiling_of_form,
)
from composattn.backends.hopper.tiling import TABLES as FORWARDS
from composattn.call.problem import Problem
from composattn.mods.mask import Mask
from composattn.mods.score import Score

Choose = Callable[..., Any]


def call_of(case: Case) -> tuple[Problem, Program]:
    """What a dense case computes, with gradients of what its mods learn."""
    pattern = case.pattern(case, torch.device("cpu"))
    score, mask = pattern.score_mod, pattern.mask_mod
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    problem = Problem(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, case.dtype,
        torch.device("cpu"),
    )  # fmt: skip
    found = fused_reads(program).items() if case.direction == "backward" else ()
    learned = {capture: reads for capture, reads in found if reads and capture.tensor.requires_grad}
    return problem, GradientProgram(program, learned) if learned else program


def facts_of_case(case: Case) -> Facts:
    """What the forward of a dense case is."""
    return forward_facts(*call_of(case), HOPPER)


def backward_facts_of_case(case: Case) -> Facts:
    """What the backward of a dense case is, with dQ in any order."""
    return backward_facts(*call_of(case), HOPPER, False)


def form_of_case(case: Case) -> str:
    """Which candidate the chosen form of a case is: no other call times it."""
    if case.direction == "forward":
        return str(first(FORWARDS["forms"], facts_of_case(case)))
    call = backward_facts_of_case(case)
    return f"{first(BACKWARDS['tiles'], call)}, {first(BACKWARDS['blocks'], call)}"


def _of_form(form: str) -> Choose:
    """The forward of a call by a form of the table, whatever row is its."""

    def choose(problem: Problem, program: Program, target: Target) -> Any:
        call = forward_facts(problem, program, target)
        return tiling_of_form(form, call) if serves(form, call) else None

    return choose


def _of_backward_form(form: str) -> Choose:
    """The backward of a call by a form of the table, whatever rows are its."""

    def choose(problem: Problem, program: Program, target: Target, deterministic: bool) -> Any:
        call = backward_facts(problem, program, target, deterministic)
        return backward_of_form(form, call) if backward_serves(form, call) else None

    return choose


def _of_heads(together: bool) -> Choose:
    """The forward of a call whose grouped heads share tiles, or have each their own, as its table has it then."""

    def choose(problem: Problem, program: Program, target: Target) -> Any:
        schedule = dataclasses.replace(problem.schedule, pack_gqa=together)
        return choose_forward(dataclasses.replace(problem, schedule=schedule), program, target).tiling

    return choose


CANDIDATES: dict[Direction, dict[str, Choose]] = {
    "forward": {
        **{form: _of_form(form) for form in FORMS},
        "heads apart": _of_heads(together=False),
        "heads together": _of_heads(together=True),
    },
    "backward": {form: _of_backward_form(form) for form in BACKWARD_FORMS},
}
NAMES = {name for candidates in CANDIDATES.values() for name in candidates}
_CHOSEN: dict[Direction, Choose] = {"forward": choose_forward, "backward": choose_backward}


def others_of(case: Case) -> list[str]:
    """Candidates that have a tiling of their own for a case, which is not the chosen one."""
    call = (*call_of(case), HOPPER, *(() if case.direction == "forward" else (False,)))
    taken, found = [_CHOSEN[case.direction](*call).tiling], []
    for name, candidate in CANDIDATES[case.direction].items():
        with contextlib.suppress(AssertionError, ValueError):  # fields that exclude each other
            tiling = candidate(*call)
            if tiling is not None and tiling not in taken:
                taken.append(tiling)
                found.append(name)
    return found


@contextlib.contextmanager
def cut_by(direction: Direction, name: str) -> Iterator[None]:
    """Inside, calls are cut as the candidate says; raises `NotServed` there where it has no tiling of its own."""
    before = dict(ARCHITECTURES)

    def choose(*call: Any) -> Any:
        taken = [_CHOSEN[direction](*call).tiling]
        for other, candidate in CANDIDATES[direction].items():
            try:
                tiling = candidate(*call)
            except (AssertionError, ValueError):  # fields that exclude each other
                tiling = None
            if other == name:
                if tiling is None or tiling in taken:
                    raise NotServed("no tiling of its own")
                return Chosen(tiling, name)
            taken.append(tiling)
        raise KeyError(name)

    chooses: dict[str, Any] = {direction: choose}
    ARCHITECTURES["hopper"] = dataclasses.replace(before["hopper"], **chooses)
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
