"""Who is which warp of a block, and with how many registers: forward and backward."""

from __future__ import annotations

import dataclasses

from .tensor_memory import GROUPS

WARPGROUP = 4  # warps; each has 32 of the 128 lanes of tensor memory
REGISTERS = 65536  # of an SM


@dataclasses.dataclass(frozen=True)
class Roles:
    """`tiles` warpgroups have the rows of a query tile each, the next one corrects outputs, the last one's warps are
    the tensor core's, the loads' and the stores'.

    Registers are those of a thread; a warpgroup has one number.
    """

    tiles: int
    softmax_registers: int
    correction_registers: int
    other_registers: int

    def __post_init__(self) -> None:
        given = self.tiles * self.softmax_registers + self.correction_registers + self.other_registers
        if given > self.launched * (self.tiles + 2):
            raise ValueError(f"{given} registers of a thread of each warpgroup, launched with {self.launched} each")

    @property
    def launched(self) -> int:
        """Registers of each thread before roles trade them: as many as fit, in eights."""
        return REGISTERS // self.threads // 8 * 8

    @property
    def correction(self) -> int:
        """The first warp of the correction."""
        return self.tiles * WARPGROUP

    @property
    def matrix(self) -> int:
        return self.correction + WARPGROUP

    @property
    def load(self) -> int:
        return self.matrix + 1

    @property
    def store(self) -> int:
        return self.matrix + 2

    @property
    def threads(self) -> int:
        return (self.tiles + 2) * WARPGROUP * 32

    def __str__(self) -> str:
        softmax = f"softmax {self.tiles} x 128 threads, a row each"
        registers = f"{self.softmax_registers}/{self.correction_registers}/{self.other_registers}"
        return f"{softmax}; correction 128 threads; a warp each for products, loads, stores; registers {registers}"


TWO_TILES = Roles(tiles=2, softmax_registers=192, correction_registers=80, other_registers=48)
ONE_TILE = Roles(tiles=1, softmax_registers=240, correction_registers=128, other_registers=136)


@dataclasses.dataclass(frozen=True)
class BackwardRoles:
    """Two warpgroups compute P and dS, one takes dQ out; of the last one a warp multiplies, one copies, one waits for
    turns. Registers are those of a thread.
    """

    compute_registers: int
    dq_registers: int
    other_registers: int

    dq = GROUPS * WARPGROUP  # the first warp of each role
    matrix = dq + WARPGROUP
    load = matrix + 1
    turns = matrix + 2
    load_across = matrix + 3  # second operands, where what has to be waited for comes in another order
    threads = (GROUPS + 2) * WARPGROUP * 32

    def __post_init__(self) -> None:
        given = GROUPS * self.compute_registers + self.dq_registers + self.other_registers
        if given > (GROUPS + 2) * REGISTERS // self.threads:
            raise ValueError(f"{given} registers of a thread of each warpgroup, of {4 * REGISTERS // self.threads}")

    def __str__(self) -> str:
        registers = f"{self.compute_registers}/{self.dq_registers}/{self.other_registers}"
        return (
            f"P and dS {GROUPS} x 128 threads, half a row each; dQ 128 threads; a warp each for products, loads, "
            f"turns; registers {registers}"
        )
