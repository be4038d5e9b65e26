"""Small helpers on kernel values that also take Python numbers, so that rules can be tested with no GPU."""

from collections.abc import Iterable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Integer, Numeric
from cutlass.cutlass_dsl import cutlass_arith


def smaller(a: Any, b: Any) -> Any:
    return min(a, b) if _known(a, b) else cutlass.min(a, b)


def larger(a: Any, b: Any) -> Any:
    return max(a, b) if _known(a, b) else cutlass.max(a, b)


def _known(*values: Any) -> bool:
    return all(isinstance(v, int) for v in values)


def plain(x: Any) -> Any:
    """`x` as an integer whose quotients are rounded down, as Python's are.

    Those of CuTe's own integers are cut towards 0: -5 // 2 is -2. Such are sizes, what a fast division finds (a work
    tile's head and batch entry), and all that is computed from them.
    """
    return type(x)(cutlass_arith.ArithValue(x.value, True)) if isinstance(x, Integer) and not _known(x.value) else x


def choose(condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` else `b`, of the type of whichever is a kernel value; no branch."""
    if isinstance(condition, bool):
        return a if condition else b
    known = next((x for x in (a, b) if isinstance(x, Numeric)), None)
    kind = type(known) if known is not None else cutlass.Float32 if isinstance(a, float) else cutlass.Int32
    return kind(cutlass.select_(condition, kind(a), kind(b)))


def total(parts: Iterable[Any]) -> Any:
    """Their sum, one after the other; None of no parts."""
    found: Any = None
    for part in parts:
        found = part if found is None else found + part
    return found


def narrow(target: cute.Tensor, source: Any) -> None:
    """fp32 registers to 16-bit ones in the same order, two per instruction.

    A vector conversion falls apart into single ones for lengths that are no power of two (91 more instructions
    and spills at 176 columns), so the paired instruction is written out.
    """
    words = cute.recast_tensor(target, cutlass.Int32)
    for i, word in enumerate(narrow_words(source, 2 * cute.size(words), target.element_type)):
        words[i] = word


def narrow_words(source: Any, count: int, dtype: Any) -> Iterator[cutlass.Int32]:
    """The first `count` numbers, rounded to 16 bits, two neighbours a word."""
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    for i in range(0, count, 2):
        yield cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[cutlass.Int32],
            read_only_args=[source[i + 1], source[i]],
        )


def narrowed(sums: cute.Tensor, dtype) -> cute.Tensor:
    """fp32 registers, rounded to 16 bits."""
    rounded = cute.make_rmem_tensor_like(sums, dtype)
    narrow(rounded, sums)
    return rounded


def aligned(pointer: cute.Pointer) -> cute.Pointer:
    """`pointer`, known to lie at whole 16 bytes: what is found at run time counts as 4 otherwise."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=16)


def move(source: cute.Tensor, target: cute.Tensor) -> None:
    """Numbers that lie side by side along the first mode of both, up to 16 bytes: an access for each of the second.

    `cute.autovec_copy` of each one is the same code, but traced with 46 operations that ask what lies side by side.
    """
    bits = cute.size(source, mode=[0]) * source.element_type.width
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), source.element_type, num_bits_per_copy=bits)
    cute.copy(atom, source, target)


def permuted(tensor: cute.Tensor, *modes: int) -> cute.Tensor:
    """`tensor` with its modes in that order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, list(modes)))


def bits_before(count: Any) -> Any:
    """A word with its first `count` bits set, `count` from 0; all of them from 32 on."""
    if _known(count):
        return (1 << min(count, 32)) - 1
    # in PTX a shift by 32 and more gives 0
    rest = cute.arch.inline_ptx("shl.b32 {$w0}, -1, {$r0};", write_only_types=[cutlass.Int32], read_only_args=[count])
    return ~rest


def opaque(word: Any) -> Any:
    """`word`, of which the compiler knows no bit, nor that it is what it was before."""
    if _known(word):
        return word
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[cutlass.Int32], read_only_args=[word])


def zero_of(number: Any) -> Any:
    """0, which no compiler knows it to be: the sign of a loop's `number`, which counts from 0.

    What a step of the loop computes with it waits in no register for the next step.
    """
    return cute.arch.inline_ptx("shr.s32 {$w0}, {$r0}, 31;", write_only_types=[cutlass.Int32], read_only_args=[number])


class Bundle:
    """Several kernel values that cross loops and kernel boundaries as one; `parts` names them in order."""

    parts: tuple[str, ...] = ()

    def __extract_mlir_values__(self):
        self._widths = []
        values = []
        for name in self.parts:
            extracted = cutlass.extract_mlir_values(getattr(self, name))
            self._widths.append(len(extracted))
            values += extracted
        return values

    def __new_from_mlir_values__(self, values):
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        at = 0
        for name, width in zip(self.parts, self._widths, strict=True):
            part = cutlass.new_from_mlir_values(getattr(self, name), values[at : at + width])
            setattr(made, name, part)
            at += width
        return made


class Fixed:
    """An object of the trace with no run-time parts of its own: loops and branches pass it through as it is."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self
