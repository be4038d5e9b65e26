"""Products whose instructions, one for each step of the sum, are one operation of the kernel language.

`cute.gemm` makes an operation of each step, which reads and writes all sums where they are kept until the compiler
finds that they are registers: 9,000 of 13,500 operations of a causal forward. In one piece they are read and written
once, and compiling takes a fifth less.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import builtin, llvm

WORDS = 4  # registers of a left operand that a step reads


@dataclass(frozen=True)
class Instruction:
    """A step of a product: of a block of rows, of whose sums a thread has `results`.

    `spell` makes its text of what sums, left and right operand are called, and of a predicate: whether the sums go on.
    """

    results: int
    left_in_registers: bool
    spell: Callable[[str, str, str, str], str]


class _Operands:
    """What a piece of assembly takes, and what each is called in it: a number, behind those of its results."""

    def __init__(self, results: int) -> None:
        self.values: list[ir.Value] = []
        self.constraints = ["=f"] * results
        self._results = results

    def name(self, constraint: str, value: ir.Value) -> str:
        self.values.append(value)
        self.constraints.append(constraint)
        return f"${self._results + len(self.values) - 1}"


def multiply(
    instruction: Instruction,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    steps: range,
    accumulate: bool,
    anew: bool = False,
) -> None:
    """accumulator (+)= a · b over these steps of the last modes of `a` and `b`; sums of fp32 in registers.

    `anew`: what begins a sum goes on from no registers; else it names those of the sums before.
    """
    count, kept = cute.size(accumulator), accumulator.iterator.to_llvm_ptr()
    sums = llvm.StructType.get_literal([ir.F32Type.get()] * count)
    before = llvm.mlir_undef(sums) if anew and not accumulate else llvm.load(sums, kept)
    operands = _Operands(count)
    for number, value in enumerate(_members(before, ir.F32Type.get(), range(count))):
        operands.name(str(number), value)  # in the register of the result of that number
    result = llvm.inline_asm(
        sums,
        operands.values,
        "\n".join(_lines(instruction, operands, accumulator.layout, a, b, steps, accumulate)),
        ",".join(operands.constraints),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    llvm.store(result, kept)


def _lines(
    instruction: Instruction,
    operands: _Operands,
    sums: cute.Layout,
    a: cute.Tensor,
    b: cute.Tensor,
    steps: range,
    accumulate: bool,
) -> list[str]:
    """Each step with addresses of its own, made where it is: made ahead, they spill up to 39 registers."""
    right = _first_descriptor(operands, b)
    left = "" if instruction.left_in_registers else _first_descriptor(operands, a)
    words = {} if left else _registers(operands, a, steps)
    lines = []
    for step in steps:
        for block, part in itertools.product(range(cute.size(sums, mode=[1])), range(cute.size(sums, mode=[2]))):
            first = cute.crd2idx((0, block, part), sums)
            results = _listed(f"${first + number}" for number in range(instruction.results))
            right_at, move_right = _moved("right", right, cute.crd2idx((0, part, step), b.layout))
            left_at, move_left = words.get(step, ""), ""
            if left:
                left_at, move_left = _moved("left", left, cute.crd2idx((0, block, step), a.layout))
            lines += [
                "{ .reg .pred goes_on; .reg .b64 left, right;",
                f"setp.ne.b32 goes_on, {int(accumulate or step > steps.start)}, 0; {move_right}{move_left}",
                f"{instruction.spell(results, left_at, right_at, 'goes_on')} }}",
            ]
    return lines


def _moved(name: str, first: str, by: int) -> tuple[str, str]:
    """What a step's descriptor is called, and the instruction that makes it of the first one's."""
    return (name, f"add.s64 {name}, {first}, {by}; ") if by else (first, "")


def _first_descriptor(operands: _Operands, tile: cute.Tensor) -> str:
    """The name of what says where a tile in shared memory is, and how it lies; its layout's strides are added to it."""
    integer = ir.IntegerType.get_signless(64)
    return operands.name("l", builtin.unrealized_conversion_cast([integer], [tile.iterator]))


def _registers(operands: _Operands, a: cute.Tensor, steps: range) -> dict[int, str]:
    """The names of each step's registers of a left operand of one block, whose numbers of 16 bits lie in pairs."""
    word = ir.IntegerType.get_signless(32)
    loaded = llvm.load(llvm.StructType.get_literal([word] * (cute.cosize(a.layout) // 2)), a.iterator.to_llvm_ptr())
    names = {}
    for step in steps:
        first = cute.crd2idx((0, 0, step), a.layout) // 2
        words = _members(loaded, word, range(first, first + WORDS))
        names[step] = _listed(operands.name("r", value) for value in words)
    return names


def _members(struct: ir.Value, kind: ir.Type, numbers: Iterable[int]) -> list[Any]:
    return [llvm.extractvalue(kind, struct, [number]) for number in numbers]


def _listed(names: Iterable[str]) -> str:
    return "{" + ", ".join(names) + "}"


__all__ = ["Instruction", "multiply"]
