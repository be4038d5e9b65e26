"""Mutants of a kernel's PTX: one synchronisation, descriptor, coordinate or comparison wrong each: is it noticed?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from composattn.emulator.findings import Finding, UnknownInstruction
from composattn.emulator.launch import Result
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.program import PtxProgram
from composattn.emulator.ptx import Imm, Instr, Operand, PtxKernel, Reg, Vec, parse

MODES: tuple[Mode, ...] = (EAGER, LATE, random_mode(1), random_mode(2))


@dataclass(frozen=True)
class Mutant:
    """A PTX text that differs from the kernel's in one instruction. `kind` says how, `instr` is the one it was."""

    kind: str
    instr: Instr
    text: str


@dataclass(frozen=True)
class Trial:
    """One call that every mutant is put to: `launch` runs a program anew; `same` says if it left the right result."""

    launch: Callable[[PtxProgram, Mode], Result]
    same: Callable[[], bool]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `how` is a finding's class name, "wrong result", "not reached" or "survived"."""

    mutant: Mutant
    how: str
    detail: str = ""

    @property
    def caught(self) -> bool:
        return self.how not in ("not reached", "survived")


def _statement(text: str) -> str:
    """A pattern for the statement as it stands in the source, however it is spaced."""
    return r"\s*".join(re.escape(word) for word in text.split()) + r"\s*;"


def _edit(source: list[str], instr: Instr, change: Callable[[str], str]) -> str | None:
    """The source with `change` applied to the instruction's statement; None if that changes nothing."""
    at = instr.line - 1
    for end in range(at + 1, min(at + 12, len(source)) + 1):
        part = "\n".join(source[at:end])
        match = re.search(_statement(instr.text), part)
        if match is not None:
            new = change(match.group())
            if new == match.group():
                return None
            return "\n".join([*source[:at], part[: match.start()] + new + part[match.end() :], *source[end:]])
    return None


def _wait_skipped(text: str) -> str:
    return re.sub(r"mbarrier\.try_wait[\w.:]*\s+([%\w$]+),[^;]*;", r"setp.eq.u32 \1, 0, 0;", text)


def _of_the_own_block(text: str) -> str:
    return text.replace("::cluster", "::cta")


def _weaker(text: str) -> str:
    return re.sub(r"(\d+)\s*;$", lambda m: f"{int(m[1]) + 1};", text)


def _other_coordinate(text: str) -> str:
    """The first two coordinates of a tensor copy change places."""
    return re.sub(r"\{(\s*[^,}]+),(\s*[^,}]+)", r"{\2,\1", text, count=1)


def _lefts_exchanged(text: str) -> str:
    """The first two registers of a product's left operand, rows r and r + 8, change places."""
    vectors = [match.span() for match in re.finditer(r"\{[^}]*\}", text)]
    start, end = vectors[1]
    return text[:start] + _other_coordinate(text[start:end]) + text[end:]


def _turned(text: str) -> str:
    """Matrices are read as they lie where they were turned, and the other way round."""
    return text.replace(".trans", "") if ".trans" in text else re.sub(r"\.x([124])", r".x\1.trans", text, count=1)


def _matrix_further(text: str) -> str:
    """Matrices read 16 bytes further on."""
    return re.sub(r"\[([%\w$]+)(?:\s*\+\s*(-?\d+))?\]", lambda m: f"[{m[1]}+{int(m[2] or 0) + 16}]", text, count=1)


def _turn_taken(text: str) -> str:
    """A number in memory for which others wait is read as one that is large enough."""
    return re.sub(r"ld\.acquire[\w.]*\s+([%\w$]+),[^;]*;", r"mov.b32 \1, 2147483647;", text)


def _further(text: str) -> str:
    """A matrix descriptor one step of 16 bytes further on."""
    return re.sub(r", (\d+)\s*;$", lambda m: f", {int(m[1]) + 1};", text)


def _other_column(text: str) -> str:
    """Tensor memory one column further."""
    return re.sub(r"\[([%\w$]+)(?:\s*\+\s*(-?\d+))?\]", lambda m: f"[{m[1]}+{int(m[2] or 0) + 1}]", text, count=1)


_SHIFTED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}


def _other_side(text: str) -> str:
    """A comparison of integers that answers otherwise where both are equal, and only there."""
    return re.sub(r"(?<=setp\.)\w+", lambda m: _SHIFTED[m[0]], text, count=1)


KINDS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("wait skipped", r"mbarrier\.try_wait", _wait_skipped),
    ("arrival dropped", r"mbarrier\.arrive|bar(rier)?(\.cta)?\.arrive", lambda t: ""),
    ("wait weakened", r"wgmma\.wait_group|cp\.async\.(bulk\.)?wait_group", _weaker),
    ("wait dropped", r"wgmma\.wait_group|cp\.async\.(bulk\.)?wait_group", lambda t: ""),
    ("barrier dropped", r"bar(rier)?(\.cta)?\.sync", lambda t: ""),
    ("proxy fence dropped", r"fence\.proxy\.async", lambda t: ""),
    ("proxy fence narrowed", r"fence\.proxy\.async\.shared::cluster", _of_the_own_block),
    ("init fence dropped", r"fence\.mbarrier_init", lambda t: ""),
    ("commit dropped", r"wgmma\.commit_group|cp\.async\.(bulk\.)?commit_group|tcgen05\.commit", lambda t: ""),
    ("registers kept", r"setmaxnreg\.dec", lambda t: ""),
    ("wgmma fence dropped", r"wgmma\.fence", lambda t: ""),
    ("tensor wait dropped", r"tcgen05\.wait", lambda t: ""),
    ("tensor fence dropped", r"tcgen05\.fence", lambda t: ""),
    ("columns kept", r"tcgen05\.dealloc", lambda t: ""),
    ("column wrong", r"tcgen05\.(ld|st|mma)", _other_column),
    ("coordinate wrong", r"cp\.(reduce\.)?async\.bulk\.tensor", _other_coordinate),
    ("copy dropped", r"cp\.async\.c[ag]", lambda t: ""),
    ("operands exchanged", r"mma\.sync", _lefts_exchanged),
    ("matrix turned", r"ldmatrix", _turned),
    ("matrix elsewhere", r"ldmatrix", _matrix_further),
    ("value not put", r"st\.shared\.b32", lambda t: ""),
    ("sum dropped", r"red\.[\w.]*\.f32", lambda t: ""),
    ("turn not awaited", r"ld\.acquire", _turn_taken),
    ("turn not passed", r"red\.[\w.]*\.s32", lambda t: ""),
    ("comparison off by one", r"setp\.(l[tes]|g[te]|lo|h[is])\.[su]\d", _other_side),
)


TIMELESS = {
    "coordinate wrong",
    "copy dropped",
    "operands exchanged",
    "matrix turned",
    "matrix elsewhere",
    "sum dropped",
    "comparison off by one",
    "descriptor wrong",
    "column wrong",
    "columns kept",
}  # wrong in every mode or in none


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a kernel, kind by kind, in program order."""
    kernel = parse(text)
    source = text.split("\n")
    for kind, pattern, change in KINDS:
        for instr in kernel.code:
            if re.match(pattern, instr.op):
                new = _edit(source, instr, change)
                if new is not None:
                    yield Mutant(kind, instr, new)
    for instr in _descriptor_steps(kernel):
        new = _edit(source, instr, _further)
        if new is not None:
            yield Mutant("descriptor wrong", instr, new)


def _descriptor_steps(kernel: PtxKernel) -> list[Instr]:
    """Where a literal is put to what becomes a matrix descriptor, or half of one."""
    wanted: set[Operand] = set()
    for instr in kernel.code:
        if instr.op.startswith(("wgmma.mma_async", "tcgen05.mma")):
            wanted |= {a for a in instr.args[1:3] if isinstance(a, Reg)}
    for instr in kernel.code:
        if instr.op == "mov.b64" and instr.args[0] in wanted and isinstance(instr.args[1], Vec):
            wanted |= set(instr.args[1].items)
    steps = ("add.s32", "add.s64", "or.b64")
    return [i for i in kernel.code if i.op in steps and i.args[0] in wanted and isinstance(i.args[2], Imm)]


def judge(
    text: str, trials: Sequence[Trial], modes: Sequence[Mode] = MODES, only: Callable[[Mutant], bool] = lambda m: True
) -> Iterator[Verdict]:
    """Puts every mutant of a kernel to the trials until it is caught: in every mode, if that makes a difference."""
    reached = [_reached(PtxProgram(text), t.launch) for t in trials]
    for mutant in mutants(text):
        if not only(mutant):
            continue
        meeting = [t for t, lines in zip(trials, reached, strict=True) if mutant.instr.line in lines]
        shown = modes[:1] if mutant.kind in TIMELESS else modes
        yield _verdict(mutant, meeting, shown) if meeting else Verdict(mutant, "not reached")


def _reached(program: PtxProgram, launch: Callable[[PtxProgram, Mode], Result]) -> set[int]:
    visits = launch(program, EAGER).visits.sum(0)
    return {i.line for n, v in zip(program.nodes, visits, strict=True) if v for i in n.code}


def _verdict(mutant: Mutant, trials: Sequence[Trial], modes: Sequence[Mode]) -> Verdict:
    try:
        program = PtxProgram(mutant.text)
    except UnknownInstruction as e:
        return Verdict(mutant, "UnknownInstruction", str(e))
    for trial in trials:
        for mode in modes:
            try:
                trial.launch(program, mode)
            except Finding as e:
                return Verdict(mutant, type(e).__name__, f"{mode}: {e}")
            if not trial.same():
                return Verdict(mutant, "wrong result", str(mode))
    return Verdict(mutant, "survived")
