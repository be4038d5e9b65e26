"""Matrix operands in shared memory: descriptors, the canonical layouts they name, reading them, products of two.

Facts: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "TensorCore 5th Generation Family Instructions"
(matrix-descriptor formats, canonical layouts by major-ness and swizzle: the same for both).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from composattn.emulator.findings import BadDescriptor, MissingProxyFence
from composattn.emulator.opcodes.floats import E4M3, E5M2, bf16_to_f32

Array = np.ndarray[Any, Any]
Fenced = tuple[Array, Array]  # writes that may be read, of the own block and of others: `Knowledge`
ELEMENT = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
_SWIZZLE = {0: 0, 1: 128, 2: 64, 3: 32}  # of wgmma, bits 62 and 63
_SWIZZLE_5 = {0: 0, 2: 128, 4: 64, 6: 32}  # of tcgen05, bits 61 to 63


def decode(kind: str, raw: Array) -> Array:
    """Bytes (last axis) to float32 values."""
    if kind == "bf16":
        return bf16_to_f32(raw.view(np.uint16))
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (E4M3 if kind == "e4m3" else E5M2)[raw]


@dataclass(frozen=True)
class Descriptor:
    """The fields of a shared-memory matrix descriptor, in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @staticmethod
    def of(bits: int) -> Descriptor:
        if bits >> 49 & 7:
            raise BadDescriptor(f"matrix descriptor {bits:#x} with base offset {bits >> 49 & 7}: not emulated")
        return Descriptor._with(bits, _SWIZZLE[bits >> 62 & 3])

    @staticmethod
    def of_tcgen05(bits: int) -> Descriptor:
        if bits >> 49 & 15 or bits >> 46 & 3 != 1 or bits >> 61 & 7 not in _SWIZZLE_5:
            raise BadDescriptor(
                f"matrix descriptor {bits:#x}: its version must be 1, a base offset, an absolute leading dimension and "
                f"layout {bits >> 61 & 7} are not emulated"
            )
        return Descriptor._with(bits, _SWIZZLE_5[bits >> 61 & 7])

    @staticmethod
    def _with(bits: int, swizzle: int) -> Descriptor:
        return Descriptor((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle)


@lru_cache(maxsize=4096)
def chunks_of(desc: Descriptor, rows: int, element: int, k_major: bool) -> Array:
    """16-byte chunks of an operand: [row, 2] if K is contiguous, else [k, rows / 8] (eight rows a chunk)."""
    span = desc.swizzle or 16
    if k_major:
        row, part = np.arange(rows)[:, None], np.arange(2)[None, :]
        column = part * (16 if desc.swizzle else desc.leading)
        offset = row % 8 * span + row // 8 * desc.stride + column
    else:
        if element != 2:
            raise BadDescriptor("8-bit operands must have K contiguous")
        k, group = np.arange(16)[:, None], np.arange(rows // 8)[None, :]
        per = span // 16
        if desc.swizzle:
            offset = group % per * 16 + group // per * desc.leading + k % 8 * span + k // 8 * desc.stride
        else:
            offset = group * desc.stride + k % 8 * 16 + k // 8 * desc.leading
    chunk = (desc.start + offset) // 16
    if desc.swizzle:
        chunk = chunk ^ ((chunk >> 3) & (desc.swizzle // 16 - 1))
    return chunk


@lru_cache(maxsize=4096)
def words_of_chunks(desc: Descriptor, rows: int, element: int, k_major: bool) -> Array:
    chunk = chunks_of(desc, rows, element, k_major)
    return (chunk.reshape(-1)[:, None] * 4 + np.arange(4)).reshape(-1)


@dataclass
class SharedOperand:
    """A matrix operand in shared memory."""

    desc: Descriptor
    rows: int
    kind: str
    k_major: bool

    def chunks(self) -> Array:
        return chunks_of(self.desc, self.rows, ELEMENT[self.kind], self.k_major)

    def words(self) -> Array:
        return words_of_chunks(self.desc, self.rows, ELEMENT[self.kind], self.k_major)


@dataclass
class PendingMultiply:
    """One multiply under way: accumulator (+)= left @ right^T. `left`: `SharedOperand`, or what its unit knows."""

    accumulator: Any
    accumulate: bool
    left: Any
    right: SharedOperand
    negate: bool


def chains(ops: list[Any]) -> Iterator[list[Any]]:
    """Runs of multiplies that go on in the same accumulator with operands of one form: each can be one product."""
    at = 0
    while at < len(ops):
        first, end = ops[at], at + 1
        while end < len(ops) and ops[end].accumulate and _alike(first, ops[end]):
            end += 1
        yield ops[at:end]
        at = end


def _alike(a: PendingMultiply, b: PendingMultiply) -> bool:
    return (a.accumulator, a.negate, _form(a.left), _form(a.right)) == (
        b.accumulator, b.negate, _form(b.left), _form(b.right))  # fmt: skip


def _form(side: Any) -> Any:
    return (
        (type(side), side.kind, side.k_major)
        if isinstance(side, SharedOperand)
        else (type(side), getattr(side, "kind", ""))
    )


def gather(shared: Any, operands: list[SharedOperand]) -> Array:
    """[rows, K of all operands] as float32."""
    first = operands[0]
    pairs = shared.views[8].reshape(-1, 2)
    axis = 1 if first.k_major else 0
    index = np.concatenate([o.chunks() for o in operands], axis) if len(operands) > 1 else first.chunks()
    raw = np.ascontiguousarray(pairs[index]).view(np.uint8).reshape(index.shape[0], -1)
    values = decode(first.kind, raw)
    return values if first.k_major else values.T


def read_operand(block: Any, operand: SharedOperand, knows: Array, fenced: Fenced, agent: int, clock: int) -> None:
    """Notes that `agent` reads it. Whoever starts that must know of the writes; plain ones must have been fenced."""
    memory = block.shared
    words = operand.words()
    memory.check(int(words.min()) * 4, int(words.max()) * 4 + 4)
    memory.order_read(words, knows)
    late = block.unfenced(words, *fenced)
    if late.any():
        first = int(words[late][0])
        raise MissingProxyFence(
            f"{int(late.sum())} words from shared address {first * 4:#x} were written by plain stores of "
            f"{block.cluster.agent_name(int(memory.writer[first]))} with no fence.proxy.async before this multiply"
        )
    memory.stamp_read(words, agent, clock)


def product(left: Array, right: Array) -> Array:
    """left @ right.T, in pieces that BLAS does in one thread, of at most 2^18 multiplications.

    Its threads cost more than these sizes are worth: where cores are shared a product of 128 rows took 17 ms, not 0.2.
    Sums are rounded once, so that no order of what is summed, nor which operand is the left one, shows in them.
    """
    step = max(16, 4096 // right.shape[0] // 16 * 16)
    left, right = left.astype(np.float64), right.astype(np.float64)
    out = np.empty((left.shape[0], right.shape[0]))
    for row in range(0, left.shape[0], 64):
        rows, sums = left[row : row + 64], out[row : row + 64]
        np.matmul(rows[:, :step], right[:, :step].T, out=sums)
        for k in range(step, left.shape[1], step):
            sums += np.matmul(rows[:, k : k + step], right[:, k : k + step].T)
    return out.astype(np.float32)


STEP = 32  # products of 8-bit numbers that an instruction of wgmma adds to each sum
BITS = 14  # of a number that are left where it is added on such a sum


def cut_sums(sums: Array, left: Array, right: Array) -> Array:
    """sums + left @ right.T as Hopper's unit adds products of 8-bit numbers up, in steps of 32.

    The products of a step and the sum so far are aligned to the largest exponent of them, cut to 14 bits, and added.
    So a sum that is much larger than what comes to it loses that: P·V of 8k keys whose mean is not 0 loses a tenth,
    unless sums are moved to others now and then. Source: DeepSeek-AI 2024, DeepSeek-V3, section 3.5.2; one H200 gave
    the errors of this model (2, 10, 30 and 58 % of 2k, 8k, 32k and 128k keys).
    """
    for k in range(0, left.shape[1], STEP):
        products = left[:, None, k : k + STEP] * right[None, :, k : k + STEP]
        largest = np.maximum(np.abs(products).max(-1), np.abs(sums))
        unit = np.ldexp(np.float32(1), np.frexp(largest)[1] - BITS)  # the first bit of the largest is exponent - 1
        sums = (np.trunc(products / unit[..., None]).sum(-1) + np.trunc(sums / unit)) * unit
    return sums
