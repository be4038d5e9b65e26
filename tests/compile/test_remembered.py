"""Registers that the trace remembers: branches and loops change them as if nobody did, and each is loaded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import cute as language
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.primitives import remembered
from composattn.primitives.remembered import Remembered

LANES = 32


def fake(*shape: int) -> Any:
    strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)


class Changes:
    """Two registers a lane, by number and by place: a branch that lanes below 7 take, then a loop of three rounds."""

    @cute.jit
    def __call__(self, found: cute.Tensor, stream):
        self.kernel(found).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, found):
        lane = cute.arch.lane_idx()
        registers = cute.make_rmem_tensor(2, Float32)
        registers.fill(1.0)
        held = Remembered(registers, lambda r, c: r + c)
        held[0, 1] = held[0, 0] + held[1] + Float32(lane)  # 2 + lane
        if lane < 7:
            held[0] = held[1] * 2.0
            held[1] = held[0, 0] + 1.0
        found[lane, 0], found[lane, 1] = held[0], held[1]
        for _ in cutlass.range(3, unroll=1):
            held[0] = held[0] + 1.0
        found[lane, 2] = held[0]


def test_branches_and_loops_change_what_is_remembered() -> None:
    found = torch.zeros(LANES, 3)
    kernel = Captured(Changes(), [fake(LANES, 3), make_fake_stream()])
    run(kernel.program, kernel.launch(found))
    lane = torch.arange(LANES, dtype=torch.float32)
    inside, sums = lane < 7, 2 + lane
    first = torch.where(inside, 2 * sums, 1.0)
    second = torch.where(inside, 2 * sums + 1, sums)
    assert torch.equal(found, torch.stack([first, second, first + 3], 1))


class Loads:
    """A number that is read three times, twice here and once in a branch; `done` is told after each block."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done

    @cute.jit
    def __call__(self, found: cute.Tensor, stream):
        self.kernel(found).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, found):
        held, done = Remembered(cute.make_rmem_tensor(1, Float32), lambda r, c: 0), self.done
        found[0] = held[0] + held[0]
        done()
        if cute.arch.lane_idx() < Int32(7):
            found[1] = held[0]
        done()


def test_a_number_is_loaded_once_in_each_block_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, counted = Mock(side_effect=language.memref_load), list[int]()
    monkeypatch.setattr(remembered, "language", Mock(memref_load=loads))
    Captured(Loads(lambda: counted.append(loads.call_count)), [fake(2), make_fake_stream()])
    assert counted == [1, 2]
