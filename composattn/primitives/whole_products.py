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


@dataclass(frozen=True)
class Instruction:
    """A step of a product: of a block of rows, of whose sums a thread has `results`.

    `words`: registers of 32 bits that a thread has of a step's left operand; 0: that lies in shared memory. `spell`
    makes the text of what sums, left and right operand are called, and of a predicate: whether the sums go on.
    """

    results: int
    words: int
    spell: Callable[[str, str, str, str], str]


class Operands:
    """What a piece of assembly with so many results takes, and what each is called in it: a number behind theirs."""

    def __init__(self, results: int) -> None:
        self.results = llvm.StructType.get_literal([ir.F32Type.get()] * results)
        self._values: list[ir.Value] = []
        self._constraints = ["=f"] * results
        self._count = results

    def name(self, constraint: str, value: ir.Value) -> str:
        self._values.append(value)
        self._constraints.append(constraint)
        return f"${self._count + len(self._values) - 1}"

    def go_on(self, sums: ir.Value) -> None:
        """Each result begins with the sum of its number, in the same register."""
        for number, value in enumerate(members(sums, ir.F32Type.get(), range(self._count))):
            self.name(str(number), value)

    def run(self, lines: Iterable[str], has_side_effects: bool = True) -> ir.Value:
        """The results of these instructions."""
        return llvm.inline_asm(
            self.results,
            self._values,
            "\n".join(lines),
            ",".join(self._constraints),
            has_side_effects=has_side_effects,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )


def multiply(
    instruction: Instruction,
    accumulator: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    steps: range,
    accumulate: bool,
    anew: bool = False,
) -> None:
    """accumulator (+)= a · b over these steps of the last modes of `a` and `b`; its sums of fp32 lie side by side.

    `anew`: what begins a sum goes on from no registers; else it names those of the sums before.
    """
    count, kept = cute.size(accumulator), accumulator.iterator.to_llvm_ptr()
    assert cute.cosize(accumulator.layout) == count, "sums that lie apart are not loaded as one"
    operands = Operands(count)
    anew = anew and not accumulate
    operands.go_on(llvm.mlir_undef(operands.results) if anew else llvm.load(operands.results, kept))
    result = operands.run(_lines(instruction, operands, accumulator.layout, a, b, steps, accumulate))
    llvm.store(result, kept)


# a step's operand by its block and its step: what it is called, and the instruction that makes it, or none
_Spelled = Callable[[int, int], tuple[str, str]]


def _lines(
    instruction: Instruction,
    operands: Operands,
    sums: cute.Layout,
    a: cute.Tensor,
    b: cute.Tensor,
    steps: range,
    accumulate: bool,
) -> list[str]:
    blocks, parts = (range(cute.size(sums, mode=[mode])) for mode in (1, 2))
    right = _from_shared(operands, b, "right")
    if instruction.words:
        assert len(blocks) == 1, "a left operand in registers has the rows of one block"
        left = _from_registers(operands, a, steps, instruction.words)
    else:
        left = _from_shared(operands, a, "left")
    lines = []
    for step, block, part in itertools.product(steps, blocks, parts):
        first = cute.crd2idx((0, block, part), sums)
        results = listed(f"${first + number}" for number in range(instruction.results))
        right_name, right_made = right(part, step)
        left_name, left_made = left(block, step)
        lines += [
            "{ .reg .pred goes_on; .reg .b64 left, right;",
            f"setp.ne.b32 goes_on, {int(accumulate or step > steps.start)}, 0; {right_made}{left_made}",
            f"{instruction.spell(results, left_name, right_name, 'goes_on')} }}",
        ]
    return lines


def _from_shared(operands: Operands, tile: cute.Tensor, name: str) -> _Spelled:
    """By the descriptor of a tile, which says where it is and how it lies, and to which its layout's strides are added.

    Each step adds its own, where it is: made ahead, addresses spill up to 39 registers.
    """
    integer = ir.IntegerType.get_signless(64)
    first = operands.name("l", builtin.unrealized_conversion_cast([integer], [tile.iterator]))

    def spelled(block: int, step: int) -> tuple[str, str]:
        by = cute.crd2idx((0, block, step), tile.layout)
        return (name, f"add.s64 {name}, {first}, {by}; ") if by else (first, "")

    return spelled


def _from_registers(operands: Operands, a: cute.Tensor, steps: range, words: int) -> _Spelled:
    """By the registers of each step, in which two numbers of 16 bits lie together, or four of 8."""
    word, together = ir.IntegerType.get_signless(32), 32 // a.element_type.width
    every = llvm.StructType.get_literal([word] * (cute.cosize(a.layout) // together))
    loaded, names = llvm.load(every, a.iterator.to_llvm_ptr()), {}
    for step in steps:
        first = cute.crd2idx((0, 0, step), a.layout) // together
        values = members(loaded, word, range(first, first + words))
        names[step] = listed([operands.name("r", value) for value in values])
    return lambda block, step: (names[step], "")


def members(struct: ir.Value, kind: ir.Type, numbers: Iterable[int]) -> list[Any]:
    return [llvm.extractvalue(kind, struct, [number]) for number in numbers]


def listed(names: Iterable[str]) -> str:
    return "{" + ", ".join(names) + "}"
