"""Global memory with bounds, and a block's shared memory with who wrote and read what, and when."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from composattn.emulator.findings import BarrierMisuse, Misaligned, OutOfBounds, SharedRace, UninitialisedShared

Array = np.ndarray[Any, Any]
SHARED_START = 1024  # the hardware keeps the first KiB for itself; an address below is a bug
NOBODY, HELD = -1, -2  # in place of the last writer of a word: not written yet, and part of an mbarrier
UINT: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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
    """Every tensor of a launch by address. Whatever lies between them is out of bounds."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._starts: list[int] = []

    def add(self, start: int, data: Array, name: str) -> None:
        if data.size == 0:
            return
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._allocations.insert(at, Allocation(start, data, name))

    def find(self, address: int, size: int = 1) -> Allocation:
        at = bisect.bisect(self._starts, address) - 1
        if at >= 0 and address + size <= self._allocations[at].end:
            return self._allocations[at]
        raise OutOfBounds(f"global address {self.describe(address)}, {size} bytes")

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
        if (addresses % np.uint64(size)).any():
            bad = int(addresses[addresses % np.uint64(size) != 0][0])
            raise Misaligned(f"global address {bad:#x} for an access of {size} bytes")
        low, high = int(addresses.min()), int(addresses.max())
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


class SharedMemory:
    """The bytes of one block's shared memory, and for every 4 bytes the last write and the last reads.

    Accesses are stamped (agent, clock). An agent is a warp, a warpgroup's wgmma unit, a warp's bulk stores, or the
    copies that complete on one barrier; what an access may rely on is a vector of clocks, one an agent (`knows`).
    """

    def __init__(self, size: int, agents: int) -> None:
        self.size = size
        self.data = np.zeros((size + 15) // 16 * 16, np.uint8)
        self.views = {n: self.data.view(UINT[n]) for n in UINT}
        words = self.data.size // 4
        self.writer = np.full(words, NOBODY, np.int32)
        self.written = np.zeros(words, np.int32)
        self.plain = np.zeros(words, np.bool_)  # the last write was a generic-proxy one
        self.reads: dict[int, Array] = {}
        self._agents = agents

    def check(self, low: int, high: int) -> None:
        if low < SHARED_START or high > self.size:
            raise OutOfBounds(f"shared address {low:#x}..{high:#x} of a block with {self.size} bytes")

    def order_read(self, words: Any, knows: Array) -> None:
        """Raises unless all last writes of `words` are known to a reader whose clocks are `knows`."""
        writer, written = self.writer[words], self.written[words]
        if writer.size and writer.min() < 0:
            self._check_free(words, writer)
            bad = np.broadcast_to(self._index(words), writer.shape)[writer < 0]
            raise UninitialisedShared(
                f"{bad.size} words of shared memory never written, from address {int(bad[0]) * 4:#x}"
            )
        seen = written <= knows[writer]
        if not seen.all():
            raise _Unordered(self._index(words), writer, ~seen, "written")

    def order_write(self, words: Any, knows: Array) -> None:
        """Raises unless all earlier writes and reads of `words` are known to a writer."""
        writer, written = self.writer[words], self.written[words]
        self._check_free(words, writer)
        late = (writer >= 0) & (written > knows[writer])
        if late.any():
            raise _Unordered(self._index(words), writer, late, "written")
        for agent, clocks in self.reads.items():
            late = clocks[words] > knows[agent]
            if late.any():
                raise _Unordered(self._index(words), np.full(late.shape, agent), late, "read")

    def hold(self, address: int, knows: Array) -> None:
        """The 8 bytes at `address` become an mbarrier: opaque until `forget`."""
        words = covering(address, 8)
        if (self.writer[words] != HELD).any():
            self.order_write(words, knows)
        self.writer[words] = HELD

    def forget(self, address: int) -> None:
        self.writer[covering(address, 8)] = NOBODY

    def stamp_read(self, words: Any, agent: int, clock: int) -> None:
        if agent not in self.reads:
            self.reads[agent] = np.zeros(self.writer.size, np.int32)
        self.reads[agent][words] = clock

    def stamp_write(self, words: Any, agent: Any, clock: Any, plain: bool) -> None:
        self.writer[words] = agent
        self.written[words] = clock
        self.plain[words] = plain

    def _check_free(self, words: Any, writer: Array) -> None:
        if writer.size and writer.min() == HELD:
            bad = np.broadcast_to(self._index(words), writer.shape)[writer == HELD]
            raise BarrierMisuse(f"shared address {int(bad[0]) * 4:#x} holds an mbarrier and is used as plain memory")

    @staticmethod
    def _index(words: Any) -> Array:
        return np.arange(words.start, words.stop) if isinstance(words, slice) else np.asarray(words)


class _Unordered(SharedRace):
    """A race before its agents have names; whoever knows them raises the readable one."""

    def __init__(self, words: Array, agents: Array, late: Array, what: str) -> None:
        words = np.broadcast_to(words, late.shape)
        self.address = int(words[late].ravel()[0]) * 4
        self.count = int(late.sum())
        self.agent = int(np.broadcast_to(agents, late.shape)[late].ravel()[0])
        self.what = what
        super().__init__(f"{self.count} words from shared address {self.address:#x}, last {what} by agent {self.agent}")


def covering(start: int, size: int) -> slice:
    """The 4-byte words that [start, start + size) touches."""
    return slice(start // 4, (start + size + 3) // 4)


__all__ = ["SHARED_START", "UINT", "Allocation", "GlobalMemory", "SharedMemory", "covering"]
