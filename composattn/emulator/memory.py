"""Global memory with bounds, and a block's shared memory with its ledger."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from composattn.emulator.findings import (
    BarrierMisuse,
    Finding,
    Misaligned,
    OutOfBounds,
    SharedRace,
    UninitialisedGlobal,
    UninitialisedShared,
)
from composattn.emulator.ledger import NOBODY, Ledger, Unordered

Array = np.ndarray[Any, Any]
SHARED_START = 1024  # the hardware keeps the first KiB for itself; an address below is a bug
RANK = 24  # bits of a shared address below its block's rank in the cluster
HELD = NOBODY - 1  # in place of the last writer of a word: part of an mbarrier
POISON = np.array([np.nan], np.float32).view(np.uint32)[0]  # a word of `composattn.testing.poisoned` memory
UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def span(addresses: Array) -> tuple[int, int]:
    """The lowest and the highest. The methods of an array cost twice as much as the reductions that they call."""
    return int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))


def misaligned(addresses: Array, size: int) -> int | None:
    """The first address that is no multiple of `size`, a power of two."""
    if int(np.bitwise_or.reduce(addresses)) & (size - 1) == 0:
        return None
    return next(at for at in addresses.tolist() if at & (size - 1))


class Allocation:
    """One stretch of device memory: an array of bytes at an address, with a name for messages."""

    def __init__(self, start: int, data: Array, name: str) -> None:
        self.start, self.data, self.name = start, data, name
        self.end = start + data.size
        self.written = False
        self._views: dict[int, Array | None] = {}

    def view(self, size: int) -> Array | None:
        """The bytes as unsigned integers of `size` bytes, None where the base is not aligned for it."""
        if size not in self._views:
            whole = self.data[: self.data.size // size * size]
            self._views[size] = whole.view(UINT[size]) if self.start % size == 0 else None
        return self._views[size]


class GlobalMemory:
    """Every tensor of a launch by address (of two that lie in each other, the outer one).

    Whatever lies between them is out of bounds.
    """

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._starts: list[int] = []

    def add(self, start: int, data: Array, name: str) -> None:
        end = start + data.size
        if data.size == 0 or any(a.start <= start and end <= a.end for a in self._allocations):
            return
        self._allocations = [a for a in self._allocations if a.start < start or end < a.end]
        self._starts = [a.start for a in self._allocations]
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._allocations.insert(at, Allocation(start, data, name))

    def find(self, address: int, size: int = 1) -> Allocation:
        at = bisect.bisect(self._starts, address) - 1
        if at >= 0 and address + size <= self._allocations[at].end:
            return self._allocations[at]
        raise OutOfBounds(f"global address {self.describe(address)}, {size} bytes")

    def check_counts(self, addresses: Array, words: Array) -> None:
        """Raises if 32-bit words at these addresses, which are read as counts, are what fresh memory holds."""
        unset = words.view(np.uint32).reshape(len(addresses), -1)[:, 0] == POISON
        if unset.any():
            raise UninitialisedGlobal(f"a count that nobody has set, at {self.describe(int(addresses[unset][0]))}")

    def written(self) -> list[tuple[int, int]]:
        """(start, end) of every tensor that the launch wrote to."""
        return [(a.start, a.end) for a in self._allocations if a.written]

    def describe(self, address: int) -> str:
        at = bisect.bisect(self._starts, address) - 1
        text = f"{address:#x}"
        if at >= 0:
            a = self._allocations[at]
            text += f", {address - a.start} bytes into {a.name} ({a.data.size} bytes)"
        if at + 1 < len(self._allocations):
            b = self._allocations[at + 1]
            text += f", {b.start - address} bytes before {b.name}"
        return text

    def locate(self, addresses: Array, size: int) -> tuple[Allocation, Array] | None:
        """The allocation that holds all addresses and their offsets; None if they lie in several."""
        bad = misaligned(addresses, size)
        if bad is not None:
            raise Misaligned(f"global address {bad:#x} for an access of {size} bytes")
        low, high = span(addresses)
        found = self.find(low, size)
        if high + size <= found.end:
            return found, (addresses - np.uint64(found.start)).astype(np.int64)
        return None

    def load(self, addresses: Array, size: int, count: int) -> Array:
        """[lanes, count] values of `size` bytes from consecutive addresses."""
        return self._access(addresses, size, count, None)

    def store(self, addresses: Array, size: int, values: Array) -> None:
        self._access(addresses, size, values.shape[1], values)

    def _access(self, addresses: Array, size: int, count: int, values: Array | None) -> Array:
        where = self.locate(addresses, size * count)
        if where is None:
            parts = [self._access(addresses[i : i + 1], size, count, None if values is None else values[i : i + 1])
                     for i in range(len(addresses))]  # fmt: skip
            return np.concatenate(parts)
        found, offset = where
        found.written |= values is not None
        view = found.view(size)
        if view is None:
            index = offset[:, None] + np.arange(size * count)
            if values is None:
                return found.data[index].view(UINT[size])
            found.data[index] = np.ascontiguousarray(values).view(np.uint8)
            return values
        index = offset[:, None] // size + np.arange(count)
        if values is None:
            return view[index]
        view[index] = values
        return values


class SharedMemory(Ledger):
    """The bytes of one block's shared memory; a cell is 4 bytes.

    Agents are warps, tensor cores, a warp's bulk stores, and the copies that complete on one barrier.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = np.zeros((size + 15) // 16 * 16, np.uint8)
        self.views = {n: self.data.view(UINT[n]) for n in UINT}
        super().__init__((self.data.size // 4,))
        self.plain = np.zeros(self.shape, np.bool_)  # the last write was a generic-proxy one

    def check(self, low: int, high: int) -> None:
        if low < SHARED_START or high > self.size:
            raise OutOfBounds(f"shared address {low:#x}..{high:#x} of a block with {self.size} bytes")

    def hold(self, address: int, knows: Array) -> None:
        """The 8 bytes at `address` become an mbarrier: opaque until `forget`."""
        words = covering(address, 8)
        if (self.writer[words] != HELD).any():
            self.order_write(words, knows)
        self.writer[words] = HELD

    def forget(self, address: int) -> None:
        self.writer[covering(address, 8)] = NOBODY

    def write(self, words: Any, agent: Any, clock: Any, plain: bool) -> None:
        """Stamps a write, by a plain store or by the async proxy."""
        self.stamp_write(words, agent, clock)
        self.plain[words] = plain

    def race(self, e: Unordered, writer: str) -> Finding:
        return SharedRace(
            f"{e.count} words from shared address {e.cell * 4:#x}, last {e.what} by {writer}, that nothing orders "
            "before this access"
        )

    def _unusable(self, cells: Any, writer: Array) -> None:
        if writer.min() == HELD:
            address = self.first(cells, writer == HELD) * 4
            raise BarrierMisuse(f"shared address {address:#x} holds an mbarrier and is used as plain memory")

    def _unwritten(self, cells: Any, which: Array) -> None:
        address = self.first(cells, which) * 4
        raise UninitialisedShared(f"{which.sum()} words of shared memory never written, from address {address:#x}")


def covering(start: int, size: int) -> slice:
    """The 4-byte words that [start, start + size) touches."""
    return slice(start // 4, (start + size + 3) // 4)


__all__ = ["SHARED_START", "UINT", "Allocation", "GlobalMemory", "SharedMemory", "covering", "misaligned", "span"]
