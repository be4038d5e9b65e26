"""From a plan to what is compiled: its architecture's kernel, and what stands for the arguments of a call."""

from __future__ import annotations

from typing import Any

from ..planning.plan import Plan
from ..tiles.architecture import Kernel, architecture_of


def kernel_of(plan: Plan) -> tuple[Kernel, tuple[Any, ...]]:
    """The generated kernel of a plan, and arguments to compile it with; imports the kernel language."""
    from .fake import fake_arguments

    kernel = architecture_of(plan.target).kernels()[plan.step](plan)
    kernel.kernel.set_name_prefix(plan.entry, remove_cutlass_symbol=not plan.named_cutlass, keep_mangled_name=False)
    return kernel, fake_arguments(kernel.arguments.of(plan))
