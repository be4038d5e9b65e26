"""A kernel that adds 1 to 64 numbers and is launched before the kernel before it is over."""

import cutlass.cute as cute
from cutlass import const_expr


class Early:
    def __init__(self, waits):
        self.waits = waits

    @cute.jit
    def __call__(self, numbers, stream):
        self.kernel(numbers).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, numbers):
        if const_expr(self.waits):
            cute.arch.griddepcontrol_wait()
        i = cute.arch.thread_idx()[0]
        numbers[i] = numbers[i] + 1
        cute.arch.griddepcontrol_launch_dependents()
