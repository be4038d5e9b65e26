"""Who computes: backends by name, what each takes, and the choice by device. Nothing falls back silently."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import errors, settings
from ..analysis.program import Program
from ..call.prepared import Prepare, PreparedCall
from ..call.problem import Problem
from ..call.quantized import Multiplies
from ..extras import how_to_install
from ..watched import say_once
from . import blackwell, hopper, reference, streaming, warp
from .fused.rewrites import prepared
from .fused.running.call import FusedCall
from .fused.tiles.architecture import ARCHITECTURES, Architecture, planned_for
from .fused.tiles.target import TARGETS


@dataclass(frozen=True)
class Backend:
    """One way to compute; `prepare_elsewhere`, if there is one, plans for a GPU that it knows where none is.

    `ordered`: whether a row's keys can be summed in one order whatever the call is (`Schedule.batch_invariant`).
    """

    name: str
    takes: str
    unavailable: Callable[[torch.device], str | None]
    prepare: Prepare
    prepare_elsewhere: Prepare | None = None
    ordered: bool = True


def _anywhere(device: torch.device) -> str | None:
    return None


def _without_compiler() -> str | None:
    if importlib.util.find_spec("cutlass") is None:
        return f"nvidia-cutlass-dsl is not installed: {how_to_install('gpu')}"
    return None


def _generated(architecture: Architecture) -> tuple[Backend, Backend]:
    """The kernels of an architecture, on its GPUs and emulated."""
    name, chip = architecture.name, architecture.chip

    def on_gpu(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"q lies on {device}, the kernels run on {chip} GPUs"
        picked = default_for(device)
        if picked != name and (architecture.elsewhere is None or picked not in ARCHITECTURES):
            major, minor = torch.cuda.get_device_capability(device)
            gpu = torch.cuda.get_device_name(device)
            return f"{gpu} has compute capability {major}.{minor}, which {chip} GPUs don't have"
        return _without_compiler()

    def on_cpu(device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"q lies on {device}, the emulator takes CPU tensors"
        return _without_compiler()

    def prepare(problem: Problem, program: Program, scale: float) -> PreparedCall:
        return prepared(FusedCall, problem, program, scale, ARCHITECTURES[name].target_on(problem.device))

    def elsewhere(problem: Problem, program: Program, scale: float) -> PreparedCall:
        return prepared(FusedCall, problem, program, scale, architecture.target)

    def emulated(problem: Problem, program: Program, scale: float) -> PreparedCall:
        from .fused.running.emulated import EmulatedCall  # imports the emulator: only when asked for

        return prepared(EmulatedCall, problem, program, scale, architecture.target)

    return (
        Backend(name, f"fp16 and bf16 on {chip} GPUs", on_gpu, prepare, elsewhere),
        Backend(f"{name}-emulated", "CPU tensors, small sizes", on_cpu, emulated),
    )


ARCHITECTURES |= {a.name: a for a in (hopper.ARCHITECTURE, blackwell.ARCHITECTURE, warp.ARCHITECTURE)}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("reference", "any device, dense, computes in fp64", _anywhere, reference.prepare, ordered=False),
        Backend("streaming", "any device, O(S) memory", _anywhere, streaming.prepare, ordered=False),
        *(backend for architecture in ARCHITECTURES.values() for backend in _generated(architecture)),
    )
}


def asked(name: str | None) -> str | None:
    """The backend that a call asks for which names this one: where it names none, that of `COMPOSATTN_BACKEND`."""
    return settings.BACKEND if name is None else name


def check_name(name: str | None) -> None:
    """Raises `UnknownBackend` unless `name` is None or one of `BACKENDS`."""
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise errors.UnknownBackend(f"{_told(name)}no backend {name!r}; there are {', '.join(map(repr, BACKENDS))}")


def _told(name: object) -> str:
    """Which variable of the environment says so, where one does."""
    return "COMPOSATTN_BACKEND: " if isinstance(name, str) and name == settings.BACKEND else ""


def choose(name: str | None, problem: Problem) -> Backend:
    """The backend of that name; for None the generated kernels on GPUs that have some, streaming elsewhere.

    Warns: `NeverRanOnDevice`, where None picks kernels that nobody saw run.
    Raises: `UnknownBackend`, `BackendUnavailable` (with the reason, and what can serve the call), `InvalidSchedule`.
    """
    check_name(name)
    backend = BACKENDS[name if name is not None else default_for(problem.device)]
    if problem.schedule.batch_invariant and not backend.ordered:
        raise errors.InvalidSchedule(
            f"batch_invariant=True, but backend {backend.name!r} multiplies by torch.matmul, whose bits depend on the "
            f"shapes of a call; the generated kernels can, {', '.join(ARCHITECTURES)}, emulated ones too"
        )
    if name is None:
        _say_if_without_kernels(backend.name, problem.device)
        _say_if_never_run(backend.name)
    why = backend.unavailable(problem.device)
    if why is not None:
        able = [f"{b.name!r} ({b.takes})" for b in BACKENDS.values() if b.unavailable(problem.device) is None]
        raise errors.BackendUnavailable(
            f"{_told(name)}backend {backend.name!r} can't serve this call: {why}; {', '.join(able)} can"
        )
    return backend


def _say_if_without_kernels(picked: str, device: torch.device) -> None:
    """Tells the log, once a process, that a GPU has no kernels."""
    if device.type == "cuda" and picked not in ARCHITECTURES:
        major, minor = torch.cuda.get_device_capability(device)
        say_once(
            "no kernels",
            f"streaming, in PyTorch, on {torch.cuda.get_device_name(device)}: there are no kernels "
            f"for compute capability {major}.{minor}; docs/gpus.md says for which there are",
        )


@functools.cache
def _say_if_never_run(picked: str) -> None:
    """Warns, once a process, that nobody saw the kernels of the backend that was picked run on a device."""
    architecture = ARCHITECTURES.get(picked)
    if architecture is not None and not architecture.ran:
        warnings.warn(
            f'backend=None picks "{picked}" for a {architecture.chip} GPU: its kernels were compiled, read in machine '
            "code and emulated, and never ran on such a device. `python -m composattn doctor --full` checks them on "
            f'this one; backend="{picked}" takes them without this warning, backend="streaming" computes in PyTorch',
            errors.NeverRanOnDevice,
            stacklevel=2,
        )


def to_explain(name: str | None, problem: Problem) -> tuple[Backend, Prepare, str]:
    """The backend of that name, what plans this call with it, and in words where that runs, if not here.

    Raises: as `choose`, but where the plan can be made with no GPU.
    """
    check_name(name)
    if problem.device.type == "meta":
        raise errors.BackendUnavailable(
            "q lies on meta, where no tiles can be counted; explain takes CPU tensors for every backend that has a plan"
        )
    backend = BACKENDS[name if name is not None else default_for(problem.device)]
    why = backend.unavailable(problem.device)
    if why is not None and backend.prepare_elsewhere is not None:
        gpu = planned_for(backend.name).gpu
        return backend, backend.prepare_elsewhere, f"; planned for {gpu}, not to run here: {why}"
    backend = choose(name, problem)
    return backend, backend.prepare, ""


def multiplies_eight_bits(name: str | None) -> Multiplies:
    """Whether the backend of that name, by default that of a call's device, multiplies its queries as 8-bit numbers."""

    def multiplies(problem: Problem) -> bool:
        picked = asked(name) or default_for(problem.device)
        architecture = ARCHITECTURES.get(picked.removesuffix("-emulated")) if isinstance(picked, str) else None
        return architecture is not None and architecture.multiplies_eight_bits(problem)

    return multiplies


def default_for(device: torch.device) -> str:
    """Name of the backend that `backend=None` means for tensors on `device`."""
    if device.type != "cuda":
        return "streaming"
    target = TARGETS.get(torch.cuda.get_device_capability(device))
    return "streaming" if target is None else target.backend
