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
from ....call.autograd import Gradients
from ....graph.borrowed import Borrowed
from .backward_kernels import SinkGradient
from .launch_backward import NO_TABLES, BackwardLauncher
from .scratch import kept

Memory = Callable[[torch.Tensor], torch.Tensor]
BoundBackward = Callable[..., Gradients | None]


def bound_backward(
    launcher: BackwardLauncher, q: torch.Tensor, like: Sequence[Memory], scale: float
) -> BoundBackward | None:
    """What launches the kernels of `launcher` for tensors of one form, which it has just had, if it can.

    q: of that form; `like`: make memory for the gradients of q, k, v.
    The function takes q, k, v, out, lse, dout, the captured tensors and numbers of the call, what it borrowed if
    that stands, and sinks with memory for their gradient. It gives None where it can't serve: on another device, while
    a CUDA graph is recorded, and where tables have to be made again.
    """
    reads, standing, sizes = launcher.reads, launcher.standing, launcher.sizes
    if sizes is None or sizes.of != q.shape or sizes.scratch is None:
        return None
    if standing is None and not (launcher.reads_nothing or launcher.reads_captured_alone):
        return None
    nothing, has_numbers, given = launcher.reads_nothing, reads.has_numbers, reads.given
    launches, turns_of = (launcher.launch, launcher.launch_in_range), sizes.turns  # the second one for profiles
    like_q, like_k, like_v = like
    taken, number = sizes.scratch.taken, sizes.scratch.number
    device = device_number(q.device) if has_streams(q.device) else None

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
        of_sinks: SinkGradient | None,
    ) -> Gradients | None:
        stream = None
        if device is not None:
            if device != torch._C._cuda_getDevice():
                return None
            stream = torch._C._cuda_getCurrentRawStream(device)
            if is_captured(stream):
                return None
        tables = NO_TABLES
        if standing is not None:
            tables = standing.found(borrowed, stream)
            if tables is None:
                return None
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
        return dq, dk, dv

    return run
