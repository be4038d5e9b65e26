"""Reads the PTX text of one kernel into instructions with resolved names; knows syntax, no semantics."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from composattn.emulator.findings import UnknownInstruction


@dataclass(frozen=True)
class Reg:
    """A register: `bank` is p, 16, 32, 64 or 128 bits wide; `index` its row in the bank."""

    bank: str
    index: int
    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. Integers keep their value, floats their bits and width."""

    value: int
    width: int = 0  # 32 or 64 for 0f/0d literals, 0 for an integer


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Sym:
    """The address of a parameter or of a shared array."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    """[base + offset], or [base, {coordinates}] of a tensor copy."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vec:
    """{a, b, ...}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b, two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Discard:
    """_, a result nobody wants."""


Operand = Reg | Imm | Special | Sym | Mem | Vec | Pair | Discard


@dataclass
class Instr:
    """One PTX statement: [@[!]guard] op operands, and where it stood."""

    op: str
    args: tuple[Operand, ...]
    line: int
    text: str
    guard: Reg | None = None
    negate: bool = False
    source: str = ""
    target: str = ""  # of a branch

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")

    def where(self) -> str:
        return f"PTX line {self.line}: {self.text}" + (f"  ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Param:
    """One kernel parameter: its size and alignment in bytes."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class SharedArray:
    """A .shared array; `size` 0 is the launch's dynamic shared memory."""

    name: str
    size: int
    align: int


@dataclass
class PtxKernel:
    """What a PTX module with one entry says."""

    name: str
    params: list[Param]
    shared: list[SharedArray]
    code: list[Instr]
    labels: dict[str, int]  # label -> index in code
    banks: dict[str, int]  # how many registers each bank needs
    threads: tuple[int, int, int]
    resident: int  # blocks that an SM's registers must have room for
    text: str = field(repr=False, default="")


_SIZES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
}
_BANKS = {
    "pred": "p",
    "b16": "16",
    "u16": "16",
    "s16": "16",
    "f16": "16",
    "b32": "32",
    "u32": "32",
    "s32": "32",
    "f32": "32",
    "b64": "64",
    "u64": "64",
    "s64": "64",
    "f64": "64",
    "b8": "16",
    "b128": "128",
}
_LABEL = re.compile(r"([$%\w]+)\s*:(?!:)")
_NUMBERED = re.compile(r"([%$\w]*?)(\d+)")


class _Scope:
    """Registers and labels by name, one level a brace; inner names hide outer ones."""

    def __init__(self) -> None:
        self.regs: list[dict[str, Reg]] = [{}]
        self.ranges: list[dict[str, tuple[str, int, int]]] = [{}]
        self.ids: list[int] = [0]
        self.read: list[dict[str, Operand]] = [{}]  # operands read so far: most come again, and none changes
        self.banks: dict[str, int] = {"p": 0, "16": 0, "32": 0, "64": 0, "128": 0}
        self._next = 1

    def push(self) -> None:
        self.regs.append({})
        self.ranges.append({})
        self.ids.append(self._next)
        self.read.append({})
        self._next += 1

    def pop(self) -> None:
        self.regs.pop()
        self.ranges.pop()
        self.ids.pop()
        self.read.pop()

    def declare(self, kind: str, names: str) -> None:
        bank = _BANKS.get(kind)
        if bank is None:
            raise UnknownInstruction(f"registers of type .{kind} are not emulated")
        self.read[-1].clear()
        for name in (n.strip() for n in names.split(",")):
            many = re.fullmatch(r"([%$\w]+)<(\d+)>", name)
            if many:
                self.ranges[-1][many[1]] = (bank, self.banks[bank], int(many[2]))
                self.banks[bank] += int(many[2])
            else:
                self.regs[-1][name] = Reg(bank, self.banks[bank], name)
                self.banks[bank] += 1

    def find(self, name: str) -> Reg | None:
        match = _NUMBERED.fullmatch(name)
        for regs, ranges in zip(reversed(self.regs), reversed(self.ranges), strict=True):
            if name in regs:
                return regs[name]
            if match and match[1] in ranges and int(match[2]) < ranges[match[1]][2]:
                bank, start, _ = ranges[match[1]]
                return Reg(bank, start + int(match[2]), name)
        return None


_BRACKETS = frozenset("{[(")


def _split(text: str, sep: str = ",") -> list[str]:
    """Splits at `sep` outside brackets and braces."""
    if not _BRACKETS.intersection(text):
        parts = [part.strip() for part in text.split(sep)]
        return parts if parts[-1] else parts[:-1]
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == sep and depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
    tail = text[last:].strip()
    return [*parts, tail] if tail else parts


def _operand(text: str, scope: _Scope) -> Operand:
    text = text.strip()
    found = scope.read[-1].get(text)
    if found is None:
        found = scope.read[-1][text] = _new_operand(text, scope)
    return found


def _new_operand(text: str, scope: _Scope) -> Operand:
    if text == "_":
        return Discard()
    if text[0] == "{":
        return Vec(tuple(_operand(t, scope) for t in _split(text[1:-1])))
    if text[0] == "[":
        return _memory(text[1:-1], scope)
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first, scope), _operand(second, scope))
    reg = scope.find(text)
    if reg is not None:
        return reg
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Imm(int(text[2:], 16), 32)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Imm(int(text[2:], 16), 64)
    if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
        return Imm(int(text.rstrip("U"), 0))
    if re.match(r"-?\d+\.\d*(e[-+]?\d+)?$", text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    if text[0] == "%":
        return Special(text)
    plus = re.fullmatch(r"([\w$]+)\s*(?:([+-])\s*(\d+))?", text)
    if plus:
        return Sym(plus[1], int((plus[2] or "+") + (plus[3] or "0")))
    raise UnknownInstruction(f"operand {text!r} is not PTX that the emulator reads")


def _memory(text: str, scope: _Scope) -> Mem:
    parts = _split(text)
    coords: tuple[Operand, ...] = ()
    if len(parts) > 1:
        vec = _operand(parts[1], scope)
        coords = vec.items if isinstance(vec, Vec) else (vec,)
    match = re.fullmatch(r"(.*?)(?:\s*\+\s*(-?(?:0x[0-9a-fA-F]+|\d+)))?", parts[0])
    assert match is not None
    base = _operand(match[1], scope)
    offset = int(match[2] or "0", 0)
    if isinstance(base, Sym):
        return Mem(Sym(base.name), base.offset + offset, coords)
    assert isinstance(base, Reg | Imm)
    return Mem(base, offset, coords)


def _blank_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _sources(text: str) -> dict[int, str]:
    return {int(m[1]): m[2] for m in re.finditer(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}


class _Body:
    """Walks the statements between an entry's braces."""

    def __init__(self, text: str, line: int, sources: dict[int, str]) -> None:
        self.text, self.line, self.sources = text, line, sources
        self.scope = _Scope()
        self.code: list[Instr] = []
        self.labels: dict[str, int] = {}
        self.shared: list[SharedArray] = []
        self.source = ""

    def run(self) -> None:
        text, at, n = self.text, 0, len(self.text)
        line = self.line
        while at < n:
            c = text[at]
            if c == "\n":
                line += 1
                at += 1
            elif c.isspace():
                at += 1
            elif c == "{":
                self.scope.push()
                at += 1
            elif c == "}":
                self.scope.pop()
                at += 1
            elif label := _LABEL.match(text, at):
                self.labels[self._label(label[1], declare=True)] = len(self.code)
                at = label.end()
            elif text.startswith((".loc", ".file"), at):
                end = text.find("\n", at)
                end = n if end < 0 else end
                self._loc(text[at:end])
                at = end
            else:
                end = text.index(";", at)
                self._statement(text[at:end], line)
                line += text.count("\n", at, end)
                at = end + 1

    def _label(self, name: str, declare: bool = False) -> str:
        return f"{name}@{self.scope.ids[-1]}" if declare else name

    def _loc(self, text: str) -> None:
        match = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if match:
            self.source = f"{self.sources.get(int(match[1]), '?')}:{match[2]}"

    def _statement(self, text: str, line: int) -> None:
        text = " ".join(text.split())
        if not text:
            return
        if text.startswith(".reg"):
            _, kind, names = re.split(r"[\s.]+", text[1:], maxsplit=2)
            self.scope.declare(kind, names)
            return
        if text.startswith(".shared"):
            self.shared.append(_shared(text))
            return
        if text.startswith("."):  # .pragma and the like say nothing about the result
            return
        guard, negate = None, False
        full = text
        if text[0] == "@":
            head, text = text[1:].split(None, 1)
            negate = head[0] == "!"
            guard = self.scope.find(head.lstrip("!"))
            if guard is None:
                raise UnknownInstruction(f"unknown guard in {full!r} (PTX line {line})")
        op, _, rest = text.partition(" ")
        instr = Instr(op, (), line, full, guard, negate, self.source)
        if op.split(".")[0] == "bra":
            instr.target = rest.strip()
            instr.args = ()
            instr.source = self.source
            # Inner labels hide outer ones; resolve when all are known.
            instr.target = "|".join(f"{rest.strip()}@{i}" for i in reversed(self.scope.ids))
        else:
            try:
                instr.args = tuple(_operand(t, self.scope) for t in _split(rest))
            except UnknownInstruction as e:
                raise UnknownInstruction(f"{e} (PTX line {line}: {full})") from None
        self.code.append(instr)

    def resolve(self) -> dict[str, int]:
        for instr in self.code:
            if instr.target:
                names = [t for t in instr.target.split("|") if t in self.labels]
                if not names:
                    raise UnknownInstruction(f"no such label ({instr.where()})")
                instr.target = names[0]
        return self.labels


def _shared(text: str) -> SharedArray:
    match = re.search(r"\.shared\s*(?:\.align\s+(\d+))?\s*\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?", text)
    if match is None:
        raise UnknownInstruction(f"shared declaration {text!r} is not read")
    size = _SIZES[match[2]] * int(match[4] or 0) if match[4] is not None else _SIZES[match[2]]
    return SharedArray(match[3], size, int(match[1] or _SIZES[match[2]]))


def parse(text: str) -> PtxKernel:
    """The one `.entry` of a PTX module."""
    clean = _blank_comments(text)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", clean))
    if len(entries) != 1:
        raise UnknownInstruction(f"{len(entries)} entries in the PTX module; the emulator takes one")
    entry = entries[0]
    close = clean.index(")", entry.end())
    params = []
    for p in _split(clean[entry.end() : close]):
        m = re.fullmatch(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d+)\])?", " ".join(p.split()))
        if m is None:
            raise UnknownInstruction(f"kernel parameter {p!r} is not read")
        size = _SIZES[m[2]] * int(m[4] or 1)
        params.append(Param(m[3], size, int(m[1] or _SIZES[m[2]])))
    start = clean.index("{", close)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", clean[close:start])
    resident = re.search(r"\.minnctapersm\s+(\d+)", clean[close:start])
    end = clean.rindex("}")
    body = _Body(clean[start + 1 : end], clean.count("\n", 0, start + 1) + 1, _sources(text))
    body.run()
    labels = body.resolve()
    outer = [_shared(m[0]) for m in re.finditer(r"\.shared[^;]*", clean[: entry.start()])]
    shape = (0, 0, 0)
    if threads:
        shape = (int(threads[1]), int(threads[2] or 1), int(threads[3] or 1))
    return PtxKernel(
        entry[1],
        params,
        outer + body.shared,
        body.code,
        labels,
        body.scope.banks,
        shape,
        int(resident[1]) if resident else 1,
        text,
    )
