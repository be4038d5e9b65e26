"""What is done where a condition holds that only the kernel knows."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean


@cute.jit
def when(condition: Boolean, then: cutlass.Constexpr):
    """`then()`, in a branch: what it computes must not be seen outside."""
    if condition:
        then()


@cute.jit
def store_if(condition: Boolean, target: cutlass.Constexpr, at: cutlass.Constexpr, value: cutlass.Constexpr):
    """`target[at] = value`."""
    if condition:
        target[at] = value
