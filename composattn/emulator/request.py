"""A kernel launch as the host asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composattn.emulator.findings import LaunchRefused
from composattn.emulator.memory import GlobalMemory
from composattn.emulator.symbols import Symbols
from composattn.emulator.tensormap import TensorMap

Array = np.ndarray[Any, Any]
MOST_BLOCKS = 2**31 - 1, 65535, 65535  # CUDA C++ Programming Guide, technical specifications per compute capability
MOST_THREADS = 1024, 1024, 64
MOST_SHARED = 227 * 1024  # of compute capability 9.0, 10.0 and 10.3


@dataclass
class Launch:
    """One kernel launch as the host asked for it. `params` are the raw bytes, one entry a kernel parameter."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: list[bytes]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    maps: dict[int, TensorMap] = field(default_factory=dict)  # parameter number -> tensor map
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    sms: int = 132
    shared_memory: int = MOST_SHARED  # bytes that a block can get
    early: bool = False  # a programmatic dependent launch: may start before the kernel before it is over
    unfinished: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of what that one writes
    beyond: list[tuple[int, int]] = field(default_factory=list)  # of what those before it write, if it waits for none
    queue: list[tuple[int, int, int]] = field(default_factory=list)  # first blocks of clusters not started yet
    waited: bool = False  # whether a warp has executed griddepcontrol.wait
    param_bytes: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    map_at: dict[int, TensorMap] = field(default_factory=dict)

    def bind(self, program: Symbols) -> None:
        """Lays the parameters out as the kernel declares them. Raises `LaunchRefused` for what no device launches."""
        self._check(sum(array.size for array in program.kernel.shared))
        declared = program.kernel.params
        if len(declared) != len(self.params):
            raise ValueError(f"the kernel takes {len(declared)} parameters, {len(self.params)} were given")
        self.param_bytes = np.zeros(program.param_size, np.uint8)
        for i, (p, raw) in enumerate(zip(declared, self.params, strict=True)):
            at = program.param_offset[p.name]
            if i in self.maps:
                self.map_at[at] = self.maps[i]
                continue
            if len(raw) != p.size:
                raise ValueError(f"parameter {i} takes {p.size} bytes, {len(raw)} were given")
            self.param_bytes[at : at + p.size] = np.frombuffer(raw, np.uint8)

    def _check(self, static_shared: int) -> None:
        for name, sizes, most in (("blocks", self.grid, MOST_BLOCKS), ("threads", self.block, MOST_THREADS)):
            if any(size > limit for size, limit in zip(sizes, most, strict=True)):
                raise LaunchRefused(f"{sizes} {name} are asked for, each dimension takes at most {most}")
        shared = self.dynamic_shared + static_shared
        if shared > self.shared_memory:
            raise LaunchRefused(f"{shared} bytes of shared memory are asked for, a block gets {self.shared_memory}")
