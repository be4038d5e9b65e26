"""A dense backward of one form, of which all is known: what is left of it is memory and its launches, in one function.

Torch runs a backward in a thread of its own, whose caches are cold: an instruction of Python takes 25 to 35 ns of an
H200's host there. What `FusedGradient.ready` and `BackwardLauncher.fill` ask of every call is asked once here, of
tensors that bulk copies can read as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from ....analysis.streams import device_number, has_streams, is_captured
from ....call.autograd import Grads
from ....graph.borrowed import Borrowed
from .backward_kernels import Tables
from .gradient import FusedGradient
from .launch_backward import NO_TABLES, BackwardLauncher
from .scratch import kept
from .sums import FixedPointSums

Memory = Callable[[torch.Tensor], torch.Tensor]
BoundBackward = Callable[..., Grads | None]
Found = tuple[Sequence[torch.Tensor], Tables]
Finding = Callable[[Sequence[torch.Tensor], Borrowed | None, int | None], Found | None]


def bound_backward(
    gradient: FusedGradient, of_captured: Sequence[bool], q: torch.Tensor, like: Sequence[Memory]
) -> BoundBackward | None:
    """What launches the kernels of a backward for tensors of one form, which was just had, if it can.

    `of_captured`: which captured tensors want a gradient; q: of that form; `like`: make memory for the gradients of q,
    k, v. The function takes q, k, v, out, lse, dout, the captured tensors and numbers of the call, and what it borrowed
    if that stands; it gives all gradients. It gives None where it can't serve: on another device, while a CUDA graph is
    recorded, and where tables have to be made again.
    """
    launcher, sums = gradient.before(of_captured)
    if launcher is None or not _is_bindable(launcher, q, sums):
        return None
    run = _launching(gradient, launcher, of_captured, q, like)
    return run if sums is None else _summing(run, sums, _device_of(q))


def _launching(
    gradient: FusedGradient,
    launcher: BackwardLauncher,
    of_captured: Sequence[bool],
    q: torch.Tensor,
    like: Sequence[Memory],
) -> BoundBackward:
    """What launches the kernels, with gradients of sinks where these alone are learned."""
    reads, sizes, scale = launcher.reads, launcher.sizes, gradient.scale
    assert sizes is not None and sizes.scratch is not None
    found_by = _finding(launcher)
    nothing, has_numbers, given = launcher.reads_nothing, reads.has_numbers, reads.given
    launches, turns_of = (launcher.launch, launcher.launch_in_range), sizes.turns  # the second one for profiles
    like_q, like_k, like_v = like
    taken, number = sizes.scratch.taken, sizes.scratch.number
    device, none = _device_of(q), (None,) * len(of_captured)
    learns_sinks = launcher.plans.preprocess.sinks is not None

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        captured: Sequence[torch.Tensor],
        numbers: Sequence[float | int],
        borrowed: Borrowed | None,
    ) -> Grads | None:
        stream = None
        if device is not None:
            if device != torch._C._cuda_getDevice():
                return None
            stream = torch._C._cuda_getCurrentRawStream(device)
            if is_captured(stream):
                return None
        tables = NO_TABLES
        if found_by is not None:
            found = found_by(captured, borrowed, stream)
            if found is None:
                return None
            captured, tables = found
        of_sinks, learned = gradient.memory_of_sinks(captured) if learns_sinks else (None, none)
        if nothing:
            captured = ()
        elif has_numbers:
            captured = given(captured)
        place: Any = (number, stream or 0)
        memory = kept.pop(place, None)  # as `Scratch.taken`, without the call
        if memory is None:
            memory, place = taken(stream or 0)
        dq, dk, dv = like_q(q), like_k(k), like_v(v)
        tensors = q, k, v, out, lse, dout, None, dq, dk, dv
        launch = launches[profiler._is_profiler_enabled]
        launch(tensors, scale, captured, numbers, None, tables, memory, turns_of, of_sinks)
        if place is not None:
            kept[place] = memory
        return dq, dk, dv, *learned

    return run


def _finding(launcher: BackwardLauncher) -> Finding | None:
    """What finds the tensors and tables that stand for a call, or nothing where they have to be made.

    None where calls read neither.
    """
    lasting, standing = launcher.lasting, launcher.standing
    if lasting is not None and not launcher.reads_nothing:
        return lambda captured, borrowed, stream: lasting.get(stream)
    if standing is None:
        return None

    def found(captured: Sequence[torch.Tensor], borrowed: Borrowed | None, stream: int | None) -> Any:
        tables = standing.found(borrowed, stream)
        return None if tables is None else (captured, tables)

    return found


def _summing(run: BoundBackward, sums: FixedPointSums, device: int | None) -> BoundBackward:
    """`run`, whose kernels add to these sums, and behind it their gradients of captured tensors."""

    def run_and_sum(*given: Any) -> Grads | None:
        q, k, v, out, lse, dout, captured, *others = given
        if device is not None:  # asked before anything is launched
            current = torch._C._cuda_getDevice()
            if device != current or is_captured(torch._C._cuda_getCurrentRawStream(device)):
                return None
        made = sums.begun(dout, v, None, captured)
        found = run(q, k, v, out, lse, dout, (*captured, *made), *others)
        return None if found is None else (*found[:3], *sums.gradients(made, captured))

    return run_and_sum


def _device_of(q: torch.Tensor) -> int | None:
    """Its number; None where it has no streams."""
    return device_number(q.device) if has_streams(q.device) else None


def _is_bindable(launcher: BackwardLauncher, q: torch.Tensor, sums: FixedPointSums | None) -> bool:
    """Whether all that it reads and makes is known from the form of q, or stands until somebody writes to it."""
    sizes = launcher.sizes
    if sizes is None or sizes.of != q.shape or sizes.scratch is None:
        return False
    if sums is not None:
        reads = launcher.reads
        alone = tuple(reads.captured) == (*reads.program.captures, *sums.program.made)
        return alone and not (reads.derived or reads.has_numbers or launcher.has_tables)
    kept = launcher.standing is not None or launcher.lasting is not None
    return kept or launcher.reads_nothing or launcher.reads_captured_alone
