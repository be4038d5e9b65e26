"""Graphs with what a call asks for, and a prepared call for each form of inputs that they met.

A call flows: program (graphs) → problem (checked facts of q, k, v) → backend → prepared call → (out, lse). Everything
but the last step is remembered by the form of the inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from .. import backends, errors, settings
from ..analysis.derived import stamps
from ..analysis.program import Program
from ..analysis.refreshed import belongs_to_graph
from ..call.inputs import Inputs
from ..call.prepared import PreparedCall
from ..call.problem import Problem, refuse_foreign, softmax_scale
from ..call.schedule import AUTO, Schedule
from ..graph.expr import inputs as inputs_of
from .captured import check_captures

_FORMS_LIMIT = 4096  # forms of inputs that one plan remembers, before it starts anew


class Options:
    """What a call asks for besides its mods; checked, compared by value.

    `out_dtype`: where q has 8 bits and is multiplied so; None where out is like q.
    """

    __slots__ = ("backend", "deterministic", "out_dtype", "scale", "schedule")

    def __init__(
        self,
        scale: float | None,
        backend: str | None,
        deterministic: bool | None,
        schedule: Schedule | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        softmax_scale(scale, 1)
        backend = backends.asked(backend)
        deterministic = settings.DETERMINISTIC if deterministic is None else deterministic
        backends.check_name(backend)
        if deterministic is not None and not isinstance(deterministic, bool):
            raise errors.UnsupportedOption(
                f"deterministic is {deterministic!r}; it must be True, False, or None (torch's setting)"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise errors.InvalidSchedule(f"schedule is a {type(schedule).__name__}; pass ca.Schedule(...)")
        self.scale, self.backend, self.deterministic, self.out_dtype = scale, backend, deterministic, out_dtype
        self.schedule = AUTO if schedule is None else schedule


class Plans:
    """The graphs and options of a call, and the prepared calls for all forms of inputs met so far."""

    def __init__(self, program: Program, options: Options) -> None:
        self.program, self.options = program, options
        self._prepared: dict[Any, PreparedCall] = {}  # by the form of the inputs
        self._planned: dict[Any, PreparedCall] = {}  # by what plans are made of: fewer
        self.hangs_on_contents = False  # whether a check of what the mods read looked at what the mask holds
        self._looked_at: tuple[Hashable, ...] = ()  # what that was

    def prepared(self, inputs: Inputs) -> PreparedCall:
        """The prepared call for inputs of this form, remembered."""
        try:
            form = inputs.form
        except (AttributeError, TypeError, RuntimeError):
            Problem.of(*inputs, out_dtype=self.options.out_dtype)  # not tensors, or not strided ones: says which
            raise
        if self.hangs_on_contents:
            self._look_again()
        call = self._prepared.get(form)
        if call is None:
            if len(self._prepared) >= _FORMS_LIMIT:
                self._prepared.clear()
                self._planned.clear()
            call = self._prepared[form] = self._prepare(self.problem(inputs))
        return call

    def _prepare(self, problem: Problem) -> PreparedCall:
        """Checks what the mods read, picks the backend and lets it plan, unless it did; what a repeated call skips."""
        if problem.device.type == "meta":
            raise errors.BackendUnavailable(
                "q lies on meta, which holds no numbers to compute with; for shapes alone call under "
                "torch._subclasses.fake_tensor.FakeTensorMode()"
            )
        if check_captures(self.program, problem) and not self.hangs_on_contents:
            self._looked_at = self._held_by_mask()
            self.hangs_on_contents = bool(self._looked_at)
        planned = problem.rounded
        key = (planned, planned.layout.hints)
        call = self._planned.get(key)
        if call is None:
            call = self._planned[key] = self._plan(planned)
        return call

    def check_again(self, tensors: Iterable[torch.Tensor]) -> None:
        """Checks `tensors`, which the mods read from now on in place of others of their forms."""
        for tensor in tensors:
            refuse_foreign("a captured tensor", tensor)

    def _look_again(self) -> None:
        """Lets each form be checked again where the mask holds something else than when it was; plans stay.

        Not where a CUDA graph records the call: that can't look, and no replay does.
        """
        held = self._held_by_mask()
        if (held != self._looked_at or None in held) and not belongs_to_graph():
            self.forget_checks()
            self._looked_at = held

    def _held_by_mask(self) -> tuple[Hashable, ...]:
        """Changes when a tensor or a number that the mask reads does; a None in it: nobody says so."""
        tensors, numbers = inputs_of(self.program.mask) if self.program.mask is not None else ((), ())
        return *stamps(tensors), *[number.value for number in numbers]

    def forget_checks(self) -> None:
        """Lets the next call of each form check what its mods read."""
        self._prepared.clear()

    def _plan(self, problem: Problem) -> PreparedCall:
        backend = backends.choose(self.options.backend, problem)
        return backend.prepare(problem, self.program, softmax_scale(self.options.scale, problem.head_dim))

    def problem(self, inputs: Inputs) -> Problem:
        """The checked facts of a call with these inputs."""
        problem = Problem.of(*inputs, out_dtype=self.options.out_dtype)
        options = self.options
        return dataclasses.replace(problem, deterministic=options.deterministic, schedule=options.schedule)
