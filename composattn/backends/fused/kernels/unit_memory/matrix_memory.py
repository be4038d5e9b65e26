"""Memory of a tensor core as a thread sees it, where products lie there and not in registers."""

from typing import Any, Protocol

import cutlass.cute as cute


class MatrixMemory(Protocol):
    """A thread's row of the tensor core's memory, in columns of 32 bits, counted from the first that the block has."""

    def read(self, column: Any, count: int) -> Any:
        """`count` fp32 numbers from `column` on."""

    def read_with_maxima(self, column: Any, count: int) -> Any:
        """`count` fp32 numbers, then the largest of each group of them without NaN; for units with such loads."""

    def write(self, column: Any, words: cute.Tensor) -> None:
        """32-bit registers, there after `written`."""

    def written(self) -> None:
        """What was written is there for whom the warp tells next."""

    def have_read(self) -> None:
        """What was read may be written over by whom the warp tells next."""

    def heard(self) -> None:
        """Behind a wait for others: what they have done is there."""
