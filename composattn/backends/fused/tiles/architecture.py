"""What an architecture provides for generated kernels, and the table of architectures."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ....analysis.program import Program
from ....call.problem import Problem
from ....errors import GradientUnsupported, UnsupportedCapture, UnsupportedDType, UnsupportedHeadDim
from ....graph.foreign import is_computed, is_heard
from .target import Target
from .tiling import Chosen

CAPTURE_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


class Kernel(abc.ABC):
    """A generated kernel, made of its plan: called on the host, with a stream and the fields of its `arguments`."""

    arguments: ClassVar[Any]  # a record, of `composattn.backends.fused.planning.arguments`
    kernel: ClassVar[Any]  # what runs on the device
    plan: Any

    @abc.abstractmethod
    def __init__(self, plan: Any) -> None: ...

    @abc.abstractmethod
    def __call__(self, stream: Any, *arguments: Any) -> None: ...

    def __repr__(self) -> str:
        return str(self.plan.step)  # becomes part of the compiled kernel's name


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What one family of GPUs brings, numbers and kernels; planning, compiling and launching are shared.

    `name` is that of its backend, `chip` what people call it, `target` the GPU that is planned for where none is there.
    `ran`: its kernels ran on such a GPU, and were found right. `max_head_dim` and `max_value_dim` are the largest D and
    Dv of its forward, `max_gradient_dim` is the largest of both of its backward. `forward` and `backward` choose the
    tiling of a call, and say why; the latter is told whether dQ is summed in a fixed order. `kernels`, by the step that
    a plan names, imports the kernel language. `refuses_eight_bits`: which 8-bit tensors of a call, or what they are
    multiplied by, have no kernel; "" where there is one. `reads_eight_bits`: kernels read keys and values of 8 bits,
    which else are made 16-bit numbers in memory before. `multiplies_eight_bits`: whether products of a call are of
    8-bit numbers; else 8-bit queries are widened before. `copies_boxes`: copies bring boxes of an image's columns and
    rows. `overlaps_kernels`: a kernel of a gradient is launched before the one in front of it has ended (programmatic
    dependent launch). `elsewhere`: as which GPU its kernels are planned where they are built for those of another
    architecture, for tests and timings; None: they are not.
    """

    name: str
    chip: str
    target: Target
    ran: bool
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    max_value_dim: int
    max_gradient_dim: int
    forward: Callable[[Problem, Program, Target], Chosen]
    backward: Callable[[Problem, Program, Target, bool], Chosen]
    kernels: Callable[[], Mapping[str, type[Kernel]]]
    refuses_eight_bits: Callable[[Problem, Program], str] = lambda *_: "FP8 keys and values have no kernel"
    reads_eight_bits: bool = True
    multiplies_eight_bits: Callable[[Problem], bool] = lambda _: False
    copies_boxes: bool = True
    overlaps_kernels: bool = True
    elsewhere: Target | None = None

    def check(self, problem: Problem, program: Program) -> None:
        """Refuses, before compiling, what the kernels can't do."""
        if problem.dtype not in self.dtypes:
            takes = " and ".join(str(t).removeprefix("torch.") for t in self.dtypes)
            cast = "cast q, k and v" if problem.narrow is None else "cast q, or where it has 8 bits pass out_dtype="
            raise UnsupportedDType(
                f'backend="{self.name}" multiplies {takes}, got {problem.dtype}; {cast}, or use backend="streaming"'
            )
        if problem.narrow is not None or program.values is not None:
            why = self.refuses_eight_bits(problem, program)
            if why:
                raise UnsupportedDType(
                    f"{why} on {self.name} yet; dequantise with "
                    'ca.Quantized(k, k_scale).dequantised(q.dtype), and v likewise, or use backend="streaming"'
                )
        for name, d, most in (
            ("D", problem.head_dim, self.max_head_dim),
            ("Dv", problem.head_dim_v, self.max_value_dim),
        ):
            if d > most or d % 8:
                padding = "pad with zeros (F.pad) and pass scale=, or " if d < most else ""
                raise UnsupportedHeadDim(
                    f'backend="{self.name}" takes {name} in multiples of 8 up to {most}, got {d}; '
                    f'{padding}use backend="streaming"'
                )
        for capture in program.captures:
            self._check_captured(capture.tensor)

    def _check_captured(self, tensor: torch.Tensor) -> None:
        """Refuses what kernels would read otherwise than PyTorch."""
        if tensor.dtype not in CAPTURE_DTYPES:
            raise UnsupportedCapture(
                f'backend="{self.name}" reads captured tensors of {", ".join(map(str, CAPTURE_DTYPES))}, '
                f"got {tensor.dtype}; convert it with .to(torch.float32)"
            )
        if tensor.is_neg():
            raise UnsupportedCapture(
                f'backend="{self.name}" reads captured tensors as they lie in memory, and torch negates this '
                "view when it is read; capture tensor.resolve_neg()"
            )
        if is_computed(tensor):
            raise UnsupportedCapture(
                f'backend="{self.name}" reads captured tensors as they lie in memory, and the class '
                f"{type(tensor).__name__} computes what this one holds; capture a plain tensor made of it"
            )
        if is_heard(tensor):
            raise UnsupportedCapture(
                f'backend="{self.name}" reads captured tensors as they lie in memory, and the __torch_function__ '
                f"of {type(tensor).__name__} may change what is read; capture .as_subclass(torch.Tensor) "
                'of it, or use backend="streaming", which asks it'
            )

    def target_on(self, device: torch.device) -> Target:
        """The target of a CUDA device; of another architecture's, that of `elsewhere` with the device's machine code.

        Raises `BackendUnavailable` where no kernel is generated for it.
        """
        found = Target.of(device)
        if found.backend == self.name or self.elsewhere is None:
            return found
        return dataclasses.replace(self.elsewhere, gpu=found.gpu, arch=found.arch, sms=found.sms)

    def has_gradient(self, problem: Problem) -> bool:
        return problem.narrow is None and max(problem.head_dim, problem.head_dim_v) <= self.max_gradient_dim

    def check_gradient(self, problem: Problem) -> None:
        """Refuses gradients that the kernels can't compute."""
        if problem.narrow is not None:
            raise GradientUnsupported(
                f'backend="{self.name}" has no gradients beside keys and values of 8 bits; pass '
                "ca.Quantized(k, k_scale).dequantised(q.dtype), exact where scales are powers of two, and v likewise, "
                'or use backend="streaming"'
            )
        if not self.max_gradient_dim:
            raise GradientUnsupported(
                f'backend="{self.name}" has no backward yet; use backend="streaming" for gradients, or call it under '
                "torch.no_grad()"
            )
        if not self.has_gradient(problem):
            raise GradientUnsupported(
                f'backend="{self.name}" has gradients for D and Dv up to {self.max_gradient_dim}, got '
                f'{problem.head_dim} and {problem.head_dim_v}; use backend="streaming" for gradients, or call it under '
                "torch.no_grad()"
            )


ARCHITECTURES: dict[str, Architecture] = {}
"""By name. `composattn.backends` enters them: they are made of what this folder has, so nothing here imports them."""


def architecture_of(target: Target) -> Architecture:
    """Whose kernels run on `target`."""
    return ARCHITECTURES[target.backend]


def planned_for(backend: str | None) -> Target:
    """The GPU that is planned for where none is there: of `backend` if that generates kernels, else of the first."""
    name = (backend or "").removesuffix("-emulated")
    return ARCHITECTURES.get(name, next(iter(ARCHITECTURES.values()))).target
