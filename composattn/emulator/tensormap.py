"""Tensor maps: the geometry that the host asked for, and copying boxes between a tensor and shared memory.

Facts: PTX ISA, "Tensors" (boxes, out-of-bounds elements read as zero, interleave and swizzle modes) and the CUDA
driver API, cuTensorMapEncodeTiled (meaning and limits of each field).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from composattn.emulator.findings import BadDescriptor, OutOfBounds
from composattn.emulator.memory import GlobalMemory
from composattn.emulator.opcodes.floats import bf16_to_f32, f32_to_bf16

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. `sizes`, `strides` (bytes) and `box` are listed innermost dimension first."""

    address: int
    dtype: str  # bf16, f16, f32, e4m3, ...
    element: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0  # bytes of the swizzle span: 0, 32, 64 or 128

    def __post_init__(self) -> None:
        inner, span = self.box[0] * self.element, self.swizzle or 0
        sides_fit = min(self.box) >= 1 and max(self.box) <= 256 and min(self.sizes) >= 1 and len(self.sizes) <= 5
        aligned = all(number % 16 == 0 for number in (self.address, *self.strides[1:]))
        rules = {
            "whose innermost dimension is not contiguous": self.strides[0] == self.element,
            "with an address or stride that is no multiple of 16 bytes": aligned,
            "with a box side outside 1..256, an empty side or more than 5 sides": sides_fit,
            f"with {inner} bytes in a box row, swizzle {self.swizzle}": inner % 16 == 0 and inner <= (span or inner),
            "whose box rows do not fill the swizzle span is not emulated": inner == (span or inner),
        }
        broken = next((what for what, holds in rules.items() if not holds), None)
        if broken is not None:
            raise BadDescriptor(f"tensor map {broken}: {self}")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    def _clip(self, coords: tuple[int, ...]) -> tuple[list[slice], list[slice], bool]:
        """Slices of the tensor and of the box (outermost first) that overlap; False if nothing does."""
        tensor, box = [], []
        for c, b, n in zip(coords, self.box, self.sizes, strict=True):
            low, high = max(c, 0), min(c + b, n)
            if low >= high:
                return [], [], False
            tensor.append(slice(low, high))
            box.append(slice(low - c, high - c))
        return tensor[::-1], box[::-1], True

    def _window(self, memory: GlobalMemory, tensor: list[slice], writes: bool) -> Array:
        """The overlapping part of the tensor in memory, as [..., bytes of a row]."""
        starts = [s.start for s in tensor][::-1]
        counts = [s.stop - s.start for s in tensor][::-1]
        # addresses wrap: kernels may step back by a large stride
        first = (self.address + sum(c * s for c, s in zip(starts, self.strides, strict=True))) % (1 << 64)
        last = first + sum((n - 1) * s for n, s in zip(counts, self.strides, strict=True)) + self.element
        found = memory.find(first, 1)
        found.written |= writes
        if last > found.end:
            raise OutOfBounds(f"tensor copy up to {last - found.end} bytes behind the end of {found.name}")
        at = first - found.start
        shape = (*counts[:0:-1], counts[0] * self.element)
        strides = (*self.strides[:0:-1], 1)
        return np.lib.stride_tricks.as_strided(found.data[at:], shape, strides)

    def load(self, memory: GlobalMemory, coords: tuple[int, ...]) -> Array:
        """The box at `coords` as it lies in shared memory before swizzling; outside the tensor it is zero."""
        out = np.zeros((*self.box[:0:-1], self.box[0] * self.element), np.uint8)
        tensor, box, any_ = self._clip(coords)
        if any_:
            where = (*box[:-1], self._row(box[-1]))
            out[where] = self._window(memory, tensor, writes=False)
        return out.reshape(-1)

    def store(self, memory: GlobalMemory, coords: tuple[int, ...], data: Array, reduce: str = "") -> None:
        """The box as it lies in shared memory before swizzling, to `coords`.

        No corner of a store may lie in front of the tensor, as those of loads may: the CUDA programming guide forbids
        it, and an H200 stops at an illegal instruction.
        """
        if min(coords) < 0:
            raise OutOfBounds(f"a box stored at {coords}: its corner may lie behind an end of the tensor, not in front")
        tensor, box, any_ = self._clip(coords)
        if not any_:
            return
        whole = data.reshape(*self.box[:0:-1], self.box[0] * self.element)
        where = (*box[:-1], self._row(box[-1]))
        part = whole[where]
        window = self._window(memory, tensor, writes=True)
        if not reduce:
            window[...] = part
            return
        if reduce != "add" or self.dtype not in ("f32", "f16", "bf16"):
            raise BadDescriptor(f"tensor reduction {reduce} of {self.dtype} is not emulated")
        old, more = (np.ascontiguousarray(numbers) for numbers in (window, part))
        window[...] = _sum(old, more, self.dtype).view(np.uint8)

    def _row(self, s: slice) -> slice:
        return slice(s.start * self.element, s.stop * self.element)


def _sum(x: Array, y: Array, dtype: str) -> Array:
    """The numbers in these bytes added, each sum rounded."""
    if dtype == "bf16":
        return f32_to_bf16(bf16_to_f32(x.view(np.uint16)) + bf16_to_f32(y.view(np.uint16)))
    kind = np.float16 if dtype == "f16" else np.float32
    return np.asarray(x.view(kind) + y.view(kind))


def swizzled_chunks(address: int, count: int, span: int) -> Array:
    """Where `count` consecutive chunks of 16 bytes from `address` go, as chunk numbers of shared memory.

    The chunk's position in its row of `span` bytes is exclusive-or-ed with the row of 128 bytes modulo span / 16.
    """
    chunks = np.arange(address // 16, address // 16 + count)
    if span:
        mask = span // 16 - 1
        chunks = chunks ^ ((chunks >> 3) & mask)
    return chunks
