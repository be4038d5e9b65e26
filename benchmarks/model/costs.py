"""Clocks of each unit for a tile of a kernel, and the times that they allow: all at once, or one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from benchmarks.model import roofline
from benchmarks.model.clocks import TARGETS, UNITS, Clocks, busy
from benchmarks.model.kernels import Kernel
from benchmarks.model.loops import REDUCTIONS
from benchmarks.model.sass import SassInstruction

WARPGROUP = 128


@dataclasses.dataclass(frozen=True)
class Cost:
    """Clocks of each unit. A tile takes at least `bound`, where none waits for another, and `total` where all do."""

    clocks: dict[str, float]

    @property
    def bound(self) -> float:
        return max(self.clocks.values())

    @property
    def total(self) -> float:
        return sum(self.clocks.values())

    @property
    def unit(self) -> str:
        """The busiest."""
        return max(self.clocks, key=lambda unit: self.clocks[unit])


def tile_cost(kernel: Kernel, arch: str, tested: bool) -> Cost:
    """The cost of `kernel.rows` x `kernel.keys` on one SM."""
    return (_of_registers if arch == "sm_90a" else _of_tensor_memory)(kernel, TARGETS[arch], tested)


def _of_registers(kernel: Kernel, clocks: Clocks, tested: bool) -> Cost:
    """Products are issued by the warpgroups whose registers they end in, and read from the machine code.

    Warpgroups of different code are different roles, of which each has the same number.
    """
    working = kernel.roles.get("matrix and softmax", []) + kernel.roles.get("matrix", [])
    warps = (kernel.threads // WARPGROUP - 1) // len(working)
    total = _busy([(role.path(tested), warps) for role in working], clocks)
    m, n, pair = kernel.rows, kernel.keys, 2 * (kernel.d + kernel.dv)
    if kernel.direction == "backward":
        added = 4 * m * kernel.d
        staged = any(i.name in REDUCTIONS for i in kernel.code)  # dQ is added from shared memory, not from registers
        total["reduce"] += added / clocks.reduce
        total["shared"] += (pair * m + (added if staged else 0)) / clocks.shared
    else:
        total["shared"] += pair * n / clocks.shared
    return Cost(total)


def _of_tensor_memory(kernel: Kernel, clocks: Clocks, tested: bool) -> Cost:
    """Products are one thread's, of sizes that descriptors hold: their clocks are those of the tile's shape.

    Each 128 rows of a forward have a softmax warpgroup, and a partition has a warp of each, one that corrects, and the
    one that issues products. In a backward two warpgroups share a tile, and one takes dQ out.
    """
    k = kernel
    paired = any(i.name == "UTCHMMA" and "2CTA" in i.text for i in k.code)
    if k.direction == "forward":
        shape = roofline.forward(k.rows, k.keys, k.d, k.dv, clocks, paired)
        warps = {"softmax": k.rows // WARPGROUP, "correction": 1, "matrix": 1}
    else:
        shape = roofline.backward(k.rows, k.keys, k.d, clocks, paired, k.dv, k.transposed)
        warps = {"softmax": 2, "reduce": 1, "matrix": 1}
    paths = [(role.path(tested), warps[job]) for job in warps for role in kernel.roles.get(job, [])]
    return Cost(_busy(paths, clocks) | {unit: shape[unit] for unit in ("matrix", "shared")})


def _busy(paths: Iterable[tuple[Sequence[SassInstruction], int]], clocks: Clocks) -> dict[str, float]:
    """Clocks of each unit while so many warps of each partition go each of these ways through their loops."""
    total = dict.fromkeys(UNITS, 0.0)
    for path, warps in paths:
        for unit, taken in busy(path, clocks).items():
            total[unit] += taken * warps * (4 if unit in ("matrix", "shared") else 1)
    return total
