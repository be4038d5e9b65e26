"""Every arithmetic opcode against an independent statement of what it does, lane by lane, in Python numbers."""

from __future__ import annotations

import math
import operator
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from composattn.emulator.opcodes.fp8 import OPCODES
from tests.cpu.emulator.harness import apply

UINT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
EDGES = [
    0, 1, 2, 7, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
    2**63 - 1, 2**63, 2**64 - 1,
]  # fmt: skip


def wrap(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


def signed(value: int, bits: int) -> int:
    value = wrap(value, bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def as_float(bits: int, width: int) -> float:
    code, kind = {16: ("<H", "<e"), 32: ("<I", "<f"), 64: ("<Q", "<d")}[width]
    return struct.unpack(kind, struct.pack(code, bits))[0]


def bf16(bits: int) -> float:
    return as_float(bits << 16, 32)


def value_of(kind: str, bits: int) -> Any:
    """The number that a register's bits mean."""
    if kind == "p":
        return bool(bits)
    if kind == "bf16":
        return bf16(bits)
    width = int(kind[1:])
    if kind[0] == "f":
        return as_float(bits, width)
    return signed(bits, width) if kind[0] == "s" else wrap(bits, width)


def random_bits(kind: str, rng: np.random.Generator) -> Any:
    """32 patterns: edge cases and random ones; floats of moderate size with a few specials."""
    if kind == "p":
        return rng.integers(0, 2, 32).astype(np.uint8)
    if kind == "bf16":
        rounded = torch.from_numpy(rng.normal(size=32) * 8).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16).copy()
    width = int(kind[1:])
    if kind[0] == "f":
        x = (rng.normal(size=32) * 4).astype({16: np.float16, 32: np.float32, 64: np.float64}[width])
        x[:4] = [0.0, -0.0, 1.0, -2.5]
        if width == 32:
            x[4:7] = [np.inf, -np.inf, np.nan]
        return x.view(UINT[width])
    bits = [wrap(e, width) for e in EDGES]
    bits += [int(b) for b in rng.integers(0, 2 ** min(width, 63), 32 - len(bits), dtype=np.uint64)]
    rng.shuffle(bits)
    return np.array(bits, UINT[width])


def same(kind: str, got: int, want: Any, tolerance: float) -> bool:
    if kind in ("f16", "f32", "f64", "bf16"):
        x = bf16(got) if kind == "bf16" else as_float(got, int(kind[1:]))
        if isinstance(want, float) and math.isnan(want):
            return math.isnan(x)
        return x == want or math.isclose(x, want, rel_tol=tolerance, abs_tol=1e-37)
    if kind == "p":
        return bool(got) == bool(want)
    return got == wrap(int(want), int(kind[1:]))


def check(
    op: str, result: str, kinds: list[str], fn: Callable[..., Any], tolerance: float = 0.0, limit: Any = None
) -> None:
    rng = np.random.default_rng(zlib.crc32(op.encode()))
    inputs = [random_bits(k, rng) for k in kinds]
    if limit is not None:
        inputs = limit(inputs)
    registers = [("p" if k == "p" else "b16" if k == "bf16" else k, x) for k, x in zip(kinds, inputs, strict=True)]
    text = f"{op} {{d}}" + "".join(f", {{{letter}}}" for letter in "abce"[: len(kinds)])
    got = apply(text, "b16" if result == "bf16" else result, registers)
    for lane in range(32):
        numbers = [value_of(k, int(x[lane])) for k, x in zip(kinds, inputs, strict=True)]
        want = fn(*numbers)
        assert same(result, int(got[lane]), want, tolerance), f"{op} {numbers}: got {got[lane]:#x}, want {want}"


# --- integers: opcode -> (result, operands, Python) --------------------------------------------------------


def trunc_div(a: int, b: int) -> int:
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def trunc_rem(a: int, b: int) -> int:
    return a if b == 0 else a - trunc_div(a, b) * b


def bit_field(kind: str) -> Callable[[int, int, int], int]:
    bits = int(kind[1:])

    def run(a: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        raw = wrap(a, bits)
        if kind[0] == "u" or length == 0:
            sign = 0
        else:
            sign = raw >> min(pos + length - 1, bits - 1) & 1
        return sum(((raw >> (pos + i) & 1) if i < length and pos + i < bits else sign) << i for i in range(bits))

    return run


def insert(bits: int) -> Callable[[int, int, int, int], int]:
    def run(a: int, b: int, pos: int, length: int) -> int:
        pos, length = pos & 255, length & 255
        out = b
        for i in range(length):
            if pos + i < bits:
                out = out & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
        return out

    return run


def permute(a: int, b: int, select: int) -> int:
    source = [(a | b << 32) >> 8 * i & 255 for i in range(8)]
    out = 0
    for i in range(4):
        nibble = select >> 4 * i & 15
        byte = source[nibble & 7]
        out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return out


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def dot_of_halves(a: int, b: int, c: int) -> int:
    low, high = ((b >> 8 * i & 255 ^ 128) - 128 for i in range(2))
    return c + (a & 0xFFFF) * low + (a >> 16) * high


def find_high(kind: str) -> Callable[[int], int]:
    def run(a: int) -> int:
        x = ~a if a < 0 else a
        return x.bit_length() - 1

    return run


def integer_cases() -> dict[str, tuple[str, list[str], Callable[..., Any]]]:
    rows: dict[str, tuple[str, list[str], Callable[..., Any]]] = {}
    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        bits = int(t[1:])
        rows[f"add.{t}"] = (t, [t, t], lambda a, b: a + b)
        rows[f"sub.{t}"] = (t, [t, t], lambda a, b: a - b)
        rows[f"mul.lo.{t}"] = (t, [t, t], lambda a, b: a * b)
        rows[f"mul.hi.{t}"] = (t, [t, t], lambda a, b, n=bits: (a * b) >> n)
        rows[f"mad.lo.{t}"] = (t, [t, t, t], lambda a, b, c: a * b + c)
        rows[f"mad.hi.{t}"] = (t, [t, t, t], lambda a, b, c, n=bits: ((a * b) >> n) + c)
        rows[f"div.{t}"] = (t, [t, t], trunc_div)
        rows[f"rem.{t}"] = (t, [t, t], trunc_rem)
        rows[f"min.{t}"] = (t, [t, t], min)
        rows[f"max.{t}"] = (t, [t, t], max)
        rows[f"shr.{t}"] = (t, [t, "u32"], lambda a, n, b=bits: a >> min(n, b) if a < 0 or n < b else 0)
        if t[0] == "s":
            rows[f"neg.{t}"] = (t, [t], lambda a: -a)
            rows[f"abs.{t}"] = (t, [t], abs)
        if bits < 64:
            w = f"{t[0]}{2 * bits}"
            rows[f"mul.wide.{t}"] = (w, [t, t], lambda a, b: a * b)
            rows[f"mad.wide.{t}"] = (w, [t, t, w], lambda a, b, c: a * b + c)
    for b in ("b16", "b32", "b64"):
        n = int(b[1:])
        rows[f"and.{b}"] = (b, [b, b], lambda x, y: x & y)
        rows[f"or.{b}"] = (b, [b, b], lambda x, y: x | y)
        rows[f"xor.{b}"] = (b, [b, b], lambda x, y: x ^ y)
        rows[f"not.{b}"] = (b, [b], lambda x: ~x)
        rows[f"shl.{b}"] = (b, [b, "u32"], lambda x, s: x << min(s, 64))
        rows[f"shr.{b}"] = (b, [b, "u32"], lambda x, s: x >> min(s, 64))
        for t in (b, f"u{n}", f"s{n}"):
            rows[f"mov.{t}"] = (b, [b], lambda x: x)
            rows[f"selp.{t}"] = (b, [b, b, "p"], lambda x, y, p: x if p else y)
    for t in ("s32", "u32", "s64", "u64"):
        rows[f"bfe.{t}"] = (t, [t, "u32", "u32"], bit_field(t))
        rows[f"bfind.{t}"] = ("u32", [t], find_high(t))
    for b in ("b32", "b64"):
        n = int(b[1:])
        rows[f"bfi.{b}"] = (b, [b, b, "u32", "u32"], insert(n))
        rows[f"popc.{b}"] = ("u32", [b], lambda x: bin(x).count("1"))
        rows[f"clz.{b}"] = ("u32", [b], lambda x, n=n: n - x.bit_length())
        rows[f"brev.{b}"] = (b, [b], lambda x, n=n: int(f"{x:0{n}b}"[::-1], 2))
    rows["prmt.b32"] = ("b32", ["b32"] * 3, permute)
    rows["lop3.b32"] = ("b32", ["b32"] * 4, lop3)
    rows["dp2a.lo.u32.s32"] = ("s32", ["u32", "s32", "s32"], dot_of_halves)
    for side in "lr":
        for how in ("wrap", "clamp"):
            rows[f"shf.{side}.{how}.b32"] = ("b32", ["b32"] * 3, funnel(side, how))
    rows["min.relu.s32"] = ("s32", ["s32"] * 2, lambda a, b: max(min(a, b), 0))
    rows["max.relu.s32"] = ("s32", ["s32"] * 2, lambda a, b: max(a, b, 0))
    for name, fn in {"and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b}.items():
        rows[f"{name}.pred"] = ("p", ["p", "p"], fn)
    rows["not.pred"] = ("p", ["p"], lambda a: not a)
    rows["mov.pred"] = ("p", ["p"], lambda a: a)
    return rows


def funnel(side: str, how: str) -> Callable[[int, int, int], int]:
    def run(lo: int, hi: int, n: int) -> int:
        n = n & 31 if how == "wrap" else min(n, 32)
        both = hi << 32 | lo
        return both << n >> 32 if side == "l" else both >> n

    return run


# --- floats ------------------------------------------------------------------------------------------------


def f32(x: float) -> float:
    """Rounded to float32."""
    with np.errstate(all="ignore"):
        return float(np.float32(x))


def divide(a: float, b: float) -> float:
    if b == 0 or math.isinf(a) or math.isnan(a) or math.isnan(b):
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    return a / b


def quiet(fn: Callable[..., float]) -> Callable[..., float]:
    """Python raises where hardware gives NaN or infinity."""

    def run(*args: float) -> float:
        try:
            return fn(*args)
        except (ValueError, OverflowError, ZeroDivisionError):
            with np.errstate(all="ignore"):
                return float("nan")

    return run


def smaller(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


def larger(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def poison(fn: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else fn(a, b)


def reciprocal_root(a: float) -> float:
    if a > 0:
        return divide(1.0, math.sqrt(a))
    return math.copysign(math.inf, a) if a == 0 else math.nan


def fractions(op: str, *numbers: float) -> Fraction | float:
    """The exact result of an addition, multiplication or fused one, as a fraction where it is finite."""
    if not all(map(math.isfinite, numbers)):
        a, b, c = (*numbers, 0.0)[:3]
        return a * b + c if op.startswith("fma") else BINARY[op.split(".")[0]](a, b)
    exact = [Fraction(n) for n in numbers]
    if op.startswith("fma"):
        return exact[0] * exact[1] + exact[2]
    return {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[op.split(".")[0]](*exact)


def towards(direction: str, exact: Fraction | float) -> float:
    """The float32 next to a number on one side."""
    if not isinstance(exact, Fraction):
        return exact
    near = f32(float(exact))
    up = {"rz": exact < 0, "rm": False, "rp": True}[direction]
    if Fraction(near) == exact or (Fraction(near) > exact) == up:
        return near
    return float(np.nextafter(np.float32(near), np.float32(math.inf if up else -math.inf)))


UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda a: -a, "abs": abs, "ex2": lambda a: math.inf if a > 1000 else 2.0**a,
    "lg2": lambda a: math.log2(a) if a > 0 else (-math.inf if a == 0 else math.nan),
    "rcp": lambda a: divide(1.0, a), "sqrt": quiet(math.sqrt), "sin": quiet(math.sin), "cos": quiet(math.cos),
    "tanh": math.tanh, "rsqrt": reciprocal_root,
}  # fmt: skip
BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": divide, "min": smaller,
    "max": larger,
}  # fmt: skip


def fma(a: float, b: float, c: float) -> float:
    return a * b + c


def float_case(op: str) -> tuple[str, list[str], Callable[..., Any], float] | None:
    parts = op.split(".")
    head, kind = parts[0], parts[-1]
    tolerance = {"f32": 3e-7, "f64": 1e-15, "f16": 1e-3, "bf16": 8e-3}.get(kind, 0.0)
    if kind not in ("f32", "f64", "f16", "bf16") or head in ("setp", "set", "cvt", "selp", "mov", "copysign"):
        return None
    if parts[-2] == "f32":  # mixed: 16-bit floats, but for the last operand
        return "f32", [*[kind] * (2 if head == "fma" else 1), "f32"], {**BINARY, "fma": fma}[head], 3e-7
    if head in ("fma", "mad"):
        return kind, [kind] * 3, fma, tolerance
    if head in BINARY:
        fn = BINARY[head]
        if "NaN" in parts:
            fn = poison(fn)
        return kind, [kind] * 2, fn, tolerance
    return kind, [kind], UNARY[head], tolerance


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compare(name: str, is_float: bool) -> Callable[[Any, Any], bool]:
    if name in ("num", "nan"):
        return lambda a, b: (math.isnan(a) or math.isnan(b)) == (name == "nan")
    if name in UNSIGNED:
        return COMPARE[UNSIGNED[name]]
    if is_float and name in COMPARE:
        return lambda a, b: not (math.isnan(a) or math.isnan(b)) and COMPARE[name](a, b)
    if is_float:
        return lambda a, b: math.isnan(a) or math.isnan(b) or COMPARE[name[:-1]](a, b)
    return COMPARE[name]


NAN = {"bf16": 0x7FC0, "f16": 0x7E00, "f32": 0x7FC00000, "f64": 0x7FF8 << 48}


def is_float(kind: str) -> bool:
    return kind in NAN


def some_equal(kind: str) -> Callable[[list[Any]], list[Any]]:
    """Makes some of the random operands equal and some floats NaN: one, the other or both."""

    def run(inputs: list[Any]) -> list[Any]:
        inputs[1][8:16] = inputs[0][8:16]
        if is_float(kind):
            inputs[0][16:18] = inputs[1][17:19] = NAN[kind]
        return inputs

    return run


INTEGER = integer_cases()
FLOAT = {op: case for op in OPCODES if (case := float_case(op)) is not None}
COMPARISONS = [op for op in OPCODES if op.startswith(("setp.", "set."))]
CONVERSIONS = [op for op in OPCODES if op.startswith("cvt.")]
PACKED = [op for op in OPCODES if op.endswith(("f16x2", "bf16x2")) and not op.startswith("cvt.")]
PAIRED = [op for op in OPCODES if op.endswith("f32x2")]
THREE = [op for op in OPCODES if op.endswith(":3")]
BY_HAND = {"mov.f32", "mov.f64", "selp.f32", "selp.f64", "copysign.f32"}


@pytest.mark.parametrize("op", sorted(INTEGER))
def test_integer(op: str) -> None:
    result, kinds, fn = INTEGER[op]
    check(op, result, kinds, fn)


@pytest.mark.parametrize("op", sorted(FLOAT))
def test_float(op: str) -> None:
    result, kinds, fn, tolerance = FLOAT[op]
    # sums of large terms of both signs cancel: what is left has the error of the terms
    check_sum = op.startswith(("fma", "mad", "add", "sub"))
    rounded = f32 if result == "f32" else float
    direction = next((p for p in op.split(".") if p in ("rz", "rm", "rp")), None)
    if direction is not None:
        check(op, result, kinds, lambda *a: towards(direction, fractions(op, *a)))
        return
    if check_sum and result in ("f16", "bf16", "f32"):
        tolerance = max(tolerance, 1e-2 if result != "f32" else 1e-5)
    check(op, result, kinds, lambda *a: rounded(fn(*a)), tolerance)


@pytest.mark.parametrize("op", sorted(COMPARISONS))
def test_comparison(op: str) -> None:
    parts = op.split(".")
    if parts[0] == "set":
        kind = parts[-1]
        fn = compare(parts[1], is_float(kind))
        check(op, "u32", [kind] * 2, lambda a, b: 0xFFFFFFFF if fn(a, b) else 0, limit=some_equal(kind))
        return
    kind = parts[-1]
    fn = compare(parts[1], is_float(kind))
    combine = next((p for p in parts if p in ("and", "or", "xor")), None)
    if combine is None:
        check(op, "p", [kind] * 2, fn, limit=some_equal(kind))
    else:
        join = {"and": lambda x, y: x and y, "or": lambda x, y: x or y, "xor": lambda x, y: x != y}[combine]
        check(op, "p", [kind, kind, "p"], lambda a, b, p: join(fn(a, b), p), limit=some_equal(kind))


def torch_convert(op: str, inputs: list[Any]) -> Any:
    """What a narrowing to 16 or 8 bits gives, by torch, packed as PTX packs (first operand in the upper half)."""
    to = op.split(".")[-2]
    kind = {
        "bf16x2": torch.bfloat16,
        "f16x2": torch.float16,
        "e4m3x2": torch.float8_e4m3fn,
        "e5m2x2": torch.float8_e5m2,
    }[to]
    bits = 8 if "e" in to else 16
    limit = {"e4m3x2": 448.0, "e5m2x2": 57344.0}.get(to)
    halves = []
    for x in inputs:
        t = torch.from_numpy(x.view(np.float32).copy())
        t = t.clamp(-limit, limit) if limit else t
        t = t.relu() + 0.0 if "relu" in op else t  # zero has no sign then
        view = torch.int8 if bits == 8 else torch.int16
        halves.append(t.to(kind).view(view).numpy().view(UINT[bits]).astype(np.uint32))
    return halves[0] << bits | halves[1]


ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def convert_number(op: str) -> Callable[[Any], Any]:
    parts = [p for p in op.split(".") if p != "ftz"]
    to, source = parts[-2], parts[-1]
    rounding = ROUND.get(parts[1])

    def run(x: Any) -> Any:
        if "sat" in parts:
            return 0.0 if math.isnan(x) else min(max(x, 0.0), 1.0)
        if to[0] in "us" and is_float(source):
            bits = int(to[1:])
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
            if math.isnan(x):
                return 0
            return min(max(rounding(x) if math.isfinite(x) else x, low), high) if rounding else None
        if to[0] in "us":
            return signed(x, int(to[1:])) if to[0] == "s" else wrap(x, int(to[1:]))
        if rounding is not None:
            return float(rounding(x)) if math.isfinite(x) else x
        return float({"f16": np.float16, "f32": np.float32, "f64": np.float64}[to](x))

    return run


def to_bf16(x: Any) -> float:
    """torch rounds a long integer twice, to fp32 and then to bf16; the instruction does once."""
    if isinstance(x, float):
        return float(torch.tensor(x).to(torch.bfloat16))
    cut = max(0, x.bit_length() - 8)
    return float(round(Fraction(x, 1 << cut)) << cut)


@pytest.mark.parametrize("op", sorted(CONVERSIONS))
def test_conversion(op: str) -> None:
    parts = op.split(".")
    to, source = parts[-2], parts[-1]
    with np.errstate(all="ignore"):
        if to.endswith("x2") and source == "f32":
            rng = np.random.default_rng(5)
            pair = [random_bits("f32", rng) for _ in range(2)]
            for x in pair:
                x[4:7] = x[7:10]  # infinities and NaN: torch and PTX differ in which NaN they give
            width = "b16" if "e" in to else "b32"
            got = apply(f"{op} {{d}}, {{a}}, {{b}}", width, [("f32", pair[0]), ("f32", pair[1])])
            assert (got.astype(np.uint32) == torch_convert(op, pair)).all()
        elif source == "f16x2":
            rng = np.random.default_rng(6)
            pair = [rng.normal(0, 100, 32).astype(np.float16) for _ in range(2)]
            words = pair[0].view(np.uint16).astype(np.uint32) << 16 | pair[1].view(np.uint16)
            got = apply(f"{op} {{d}}, {{a}}", "b16", [("b32", words)])
            assert (got.astype(np.uint32) == torch_convert(op, [x.astype(np.float32) for x in pair])).all()
        elif source.endswith("x2"):
            codes = np.arange(0, 64, dtype=np.uint16)[:32] * 3 | np.arange(32, dtype=np.uint16) << 8
            got = apply(f"{op} {{d}}, {{a}}", "b32", [("b16", codes)])
            kind = torch.float8_e4m3fn if "e4m3" in source else torch.float8_e5m2
            for shift in (0, 8):
                part = torch.from_numpy((codes >> shift & 255).astype(np.uint8)).view(kind).to(torch.float16)
                mine = (got >> (2 * shift) & 0xFFFF).astype(np.uint16).view(np.float16)
                np.testing.assert_array_equal(mine, part.numpy())
        elif to == "bf16" or op == "cvt.f32.bf16":
            check(op, to, [source], to_bf16 if to == "bf16" else (lambda x: x))
        else:
            result = {"u8": "u16", "s8": "s16"}.get(to, to)
            # an 8-bit result in a wider register is sign- or zero-extended
            check(op, result, [source], convert_number(op))


def test_rounding_to_eight_bits_is_to_nearest_even_for_every_half() -> None:
    """All midpoints between neighbouring e4m3 and e5m2 values."""
    for name, kind in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        every = torch.arange(0, 127, dtype=torch.uint8).view(kind).float()
        values = every[torch.isfinite(every)].numpy()
        halves = (values[1:] + values[:-1]) / 2
        for start in range(0, len(halves) - 31, 32):
            x = halves[start : start + 32].astype(np.float32).view(np.uint32)
            got = apply(f"cvt.rn.satfinite.{name}.f32 {{d}}, {{a}}, {{b}}", "b16", [("f32", x), ("f32", x)])
            want = torch_convert(f"cvt.rn.satfinite.{name}.f32", [x, x])
            np.testing.assert_array_equal(got, want.astype(np.uint16))


@pytest.mark.parametrize("op", sorted(PACKED))
def test_packed_halves(op: str) -> None:
    parts = op.split(".")
    kind = torch.bfloat16 if "bf16x2" in parts else torch.float16
    head, count = parts[0], len(OPCODES[op].inputs)
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(rng.normal(size=64)).to(kind) for _ in range(count)]
    arrays = [t.view(torch.int16).numpy().view(np.uint32) for t in tensors]
    got = apply(f"{op} {{d}}" + "".join(f", {{{c}}}" for c in "abc"[:count]), "b32", [("b32", a) for a in arrays])
    wide = [t.double() for t in tensors]
    fns: dict[str, Callable[..., torch.Tensor]] = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "fma": lambda a, b, c: a * b + c, "min": torch.minimum,
        "max": torch.maximum, "neg": torch.neg, "abs": torch.abs, "ex2": torch.exp2, "tanh": torch.tanh,
    }  # fmt: skip
    want = fns[head](*wide).to(kind)
    mine = torch.from_numpy(got.view(np.int16).copy()).view(kind)
    torch.testing.assert_close(mine, want, rtol=0.01, atol=0)


@pytest.mark.parametrize("op", sorted(PAIRED))
def test_pairs_of_floats(op: str) -> None:
    """Each half is what the instruction for one float gives."""
    count = len(OPCODES[op].inputs)
    rng = np.random.default_rng(4)
    pairs = [np.stack([random_bits("f32", rng) for _ in range(2)], 1) for _ in range(count)]
    operands = "".join(f", {{{c}}}" for c in "abc"[:count])
    got = apply(f"{op} {{d}}{operands}", "b64", [("b64", x.view(np.uint64).reshape(-1)) for x in pairs])
    for half in (0, 1):
        alone = [("f32", np.ascontiguousarray(x[:, half])) for x in pairs]
        want = apply(f"{op.removesuffix('x2')} {{d}}{operands}", "f32", alone)
        np.testing.assert_array_equal(got.view(np.uint32).reshape(32, 2)[:, half], want)


@pytest.mark.parametrize("op", sorted(THREE))
def test_the_largest_and_smallest_of_three(op: str) -> None:
    name = op.removesuffix(":3")
    fn = BINARY[name.split(".")[0]]
    two = poison(fn) if "NaN" in name else fn
    check(name, "f32", ["f32"] * 3, lambda a, b, c: two(two(a, b), c))


def test_float_moves_and_selects() -> None:
    rng = np.random.default_rng(2)
    x, y, p = (random_bits(k, rng) for k in ("f32", "f32", "p"))
    np.testing.assert_array_equal(apply("mov.f32 {d}, {a}", "f32", [("f32", x)]), x)
    np.testing.assert_array_equal(
        apply("selp.f32 {d}, {a}, {b}, {c}", "f32", [("f32", x), ("f32", y), ("p", p)]), np.where(p, x, y)
    )
    signs = apply("copysign.f32 {d}, {a}, {b}", "f32", [("f32", x), ("f32", y)])
    np.testing.assert_array_equal(signs, y & 0x7FFFFFFF | x & 0x80000000)
    for literal, want in ((0, 0), (1, 1), (-1, 1)):
        assert (apply(f"mov.pred {{d}}, {literal}", "p", []) == want).all()
    x64, y64 = (random_bits("f64", rng) for _ in range(2))
    np.testing.assert_array_equal(apply("mov.f64 {d}, {a}", "f64", [("f64", x64)]), x64)
    got = apply("selp.f64 {d}, {a}, {b}, {c}", "f64", [("f64", x64), ("f64", y64), ("p", p)])
    np.testing.assert_array_equal(got, np.where(p, x64, y64))


def test_every_arithmetic_row_has_a_test() -> None:
    tested = {*INTEGER, *FLOAT, *COMPARISONS, *CONVERSIONS, *PACKED, *PAIRED, *THREE, *BY_HAND}
    assert set(OPCODES) - tested == set()
