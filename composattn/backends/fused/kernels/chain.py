"""Kernels behind each other: one may begin before the one in front of it has ended, where GPUs can.

What a kernel then does before it waits must need nothing of the one in front. Elsewhere the next kernel begins when all
is there, and there is nothing to say and nothing to wait for.
"""

import cutlass.cute as cute

from ..tiles.architecture import architecture_of
from ..tiles.target import Target


def overlaps(target: Target) -> bool:
    """Whether they do, on GPUs of this kind."""
    return architecture_of(target).overlaps_kernels


def let_next_begin(target: Target) -> None:
    """From here on blocks of the next kernel may begin, as blocks of this one end."""
    if overlaps(target):
        cute.arch.griddepcontrol_launch_dependents()


def wait_for_former(target: Target) -> None:
    """Until the kernel in front has ended, and what it wrote is there."""
    if overlaps(target):
        cute.arch.griddepcontrol_wait()
