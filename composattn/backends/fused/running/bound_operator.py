"""Dense calls of operators, of one form of all that they are given, of which all is known: memory, one run, launches.

Compiled code calls operators, which trust nothing that was derived before. A call by the whole way asks again what its
forms tell; here it is asked once: on a CPU 75 and 60 µs of a step's two operators, whose caches are cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from ....analysis.derived import Derived
from ....analysis.refreshed import Moment
from ....analysis.streams import device_number, has_streams
from ....call.autograd import Gradients
from ....call.sequences import NO_SEQUENCES
from ....graph.borrowed import Borrowed, BorrowedCapture
from ....graph.expr import Capture
from ....graph.tensor_forms import of_the_form
from ..tiles.work import WorkTables
from .bound_call import is_bindable, memory_of
from .kernels import FusedKernels
from .launch import ForwardLauncher, form_alone, rows_of
from .launch_backward import BackwardLauncher

T = torch.Tensor
_Read = tuple[Sequence[T], Any]
_KINDS = 4  # of backwards, the latest


class BoundOperator:
    """A fused call of inputs that are bindable, and of out and LSE."""

    __slots__ = ("_at", "_backwards", "_call", "_captures", "_device", "_lasting", "_launcher", "_lse", "_out")

    def __init__(self, call: FusedKernels, q: T, v: T, captures: tuple[BorrowedCapture, ...]) -> None:
        """`captures`: what the mods read the tensors of a call by, in its order."""
        self._call, self._captures = call, captures
        at: dict[Capture, int] = {capture: n for n, capture in enumerate(captures)}
        # what is derived of them is not given
        self._at = [(c, None if isinstance(c, Derived) else at[c]) for c in call.program.captures]
        self._launcher = call.launcher(True)
        self._device = device_number(q.device) if has_streams(q.device) else None
        self._out, self._lse = memory_of(q, v.shape[-1], call.problem.dtype), form_alone(*rows_of(q), q.device)
        self._lasting: dict[Any, _Read] = {}  # by launcher and stream
        self._backwards: tuple[tuple[Callable[..., bool], BackwardLauncher], ...] = ()

    def forward(self, q: T, k: T, v: T, captured: Sequence[T], moment: Moment) -> tuple[T, T] | None:
        """(out, lse) of tensors of its form, `captured` in the order of its captures; None on another device."""
        if self._device is not None and self._device != torch._C._cuda_getDevice():
            return None
        launcher = self._launcher
        read, (work,) = self._read(launcher, (launcher.plan.work,), captured, moment)
        out, lse = self._out(q), torch.empty_like(self._lse)
        counter, left = launcher.counted(q) if launcher.counts else (None, None)
        launch = launcher.launch_in_range if profiler._is_profiler_enabled else launcher.launch
        launch(q, k, v, out, lse, None, self._call.scale, None, work, tuple(read) or None, None, counter, left)
        return out, lse

    def backward(
        self, q: T, k: T, v: T, out: T, lse: T, dout: T, captured: Sequence[T], moment: Moment
    ) -> Gradients | None:
        """(dq, dk, dv) of a call by `forward`; None where such a backward was not had before, or on another device."""
        if self._device is not None and self._device != torch._C._cuda_getDevice():
            return None
        deterministic = self._call.gradient.deterministic()
        for are_of_forms, launcher in self._backwards:
            if launcher.plans.main.deterministic is deterministic and are_of_forms(q, k, v, out, dout, *captured):
                plans = launcher.plans
                read, tables = self._read(launcher, (plans.preprocess.work, plans.main.work), captured, moment)
                given = read, (), NO_SEQUENCES, None, None, tables
                return launcher(q, k, v, out, lse, dout, None, self._call.scale, *given)
        return None

    def learn_backward(self, q: T, k: T, v: T, out: T, dout: T, captured: Sequence[T]) -> None:
        """From now on backwards of these forms, whose kernels sum nothing, go this way if they can."""
        gradient = self._call.known_gradient
        launcher = None if gradient is None else gradient.launcher_before((False,) * len(self._at))
        if launcher is None or dout.dtype is not out.dtype or not _is_known_by_forms(launcher):
            return
        are_of_forms = of_the_form(q, k, v, out, dout, *captured)
        self._backwards = ((are_of_forms, launcher), *self._backwards[: _KINDS - 1])

    def _read(
        self,
        launcher: ForwardLauncher | BackwardLauncher,
        tables: Sequence[WorkTables | None],
        captured: Sequence[T],
        moment: Moment,
    ) -> _Read:
        """What kernels read, and their tables; those of a mask that reads nothing are made once on each stream."""
        place = None
        if not self._at:
            stream = None if self._device is None else torch._C._cuda_getCurrentRawStream(self._device)
            place = launcher, stream
            if place in self._lasting:
                return self._lasting[place]
        found: _Read
        if launcher.one_run is not None:
            with Borrowed(self._captures, captured):
                found = launcher.one_run.of(dict(zip(self._captures, captured, strict=True)), moment)
        else:
            given = [c.kept if n is None else captured[n] for c, n in self._at]
            found = launcher.reads.given(given), [t and t() for t in tables]
        if place is not None:
            self._lasting[place] = found
        return found


def _is_known_by_forms(launcher: ForwardLauncher | BackwardLauncher) -> bool:
    """Whether all that its kernels read is given, or derived from what is."""
    return launcher.one_run is not None or (launcher.reads.are_given and launcher.reads.are_as_given)


def bound_operator(call: FusedKernels, q: T, k: T, v: T, captures: tuple[BorrowedCapture, ...]) -> BoundOperator | None:
    """What serves calls of the form of these; None where more than forms decides, or what is read is not all given."""
    program = call.program
    sources = {c for c in program.captures if not isinstance(c, Derived)}
    if program.scalars or not is_bindable(q, k, v) or not sources <= set(captures):
        return None
    launcher = call.launcher(True)
    if launcher.key_type is not k.dtype or not _is_known_by_forms(launcher):
        return None
    return BoundOperator(call, q, v, captures)
