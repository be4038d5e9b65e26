"""OPCODES: integer, float, logic, compare and select instructions, one row an opcode."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from composattn.emulator.opcodes.alu_row import DTYPES, Alu
from composattn.emulator.opcodes.floats import bf16_to_f32, f32_to_bf16, f32_to_bf16x2

Array = np.ndarray[Any, Any]
OPCODES: dict[str, Alu] = {}

INTS = ("s16", "u16", "s32", "u32", "s64", "u64")
_BITS = {"16": "b16", "32": "b32", "64": "b64"}


def _add(name: str, row: Alu) -> None:
    OPCODES[name] = row


# --- integers ----------------------------------------------------------------------------------------------


def _div(a: Array, b: Array) -> Array:
    """C division, towards zero; x / 0 gives all ones, the least number / -1 itself."""
    if a.dtype.kind == "u":
        zero = b == 0
        return np.where(zero, ~a.dtype.type(0), a // np.where(zero, b.dtype.type(1), b))
    wide = np.int64
    x, y = a.astype(wide), b.astype(wide)
    safe = np.where(y == 0, 1, y)
    with np.errstate(over="ignore"):
        q = x // safe  # rounded down; of magnitudes the least number would have none
        q += (q * safe != x) & ((x < 0) ^ (safe < 0))
    return np.where(y == 0, -1, q).astype(a.dtype)


def _rem(a: Array, b: Array) -> Array:
    q = _div(a, b)
    return np.where(b == 0, a, a - q * b)


def _mul_hi(a: Array, b: Array) -> Array:
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)
    if a.dtype.itemsize == 2:
        return ((a.astype(np.int64) * b.astype(np.int64)) >> np.int64(16)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    return np.array([(int(v) >> 64) & (2**64 - 1) for v in product.ravel()], np.uint64).reshape(a.shape).view(a.dtype)


def _shl(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    return np.where(n >= bits, a.dtype.type(0), a << np.minimum(n, bits - 1).astype(a.dtype))


def _shr(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(n >= bits, a.dtype.type(0), a >> np.minimum(n, bits - 1).astype(a.dtype))


def _shf(left: bool, wrap: bool) -> Any:
    def run(lo: Array, hi: Array, n: Array) -> Array:
        count = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        both = lo.astype(np.uint64) | (hi.astype(np.uint64) << np.uint64(32))
        if left:
            return ((both << count) >> np.uint64(32)).astype(np.uint32)
        return (both >> count).astype(np.uint32)

    return run


def _bfe(a: Array, pos: Array, length: Array) -> Array:
    bits = a.dtype.itemsize * 8
    p = np.minimum(pos & np.uint32(255), bits).astype(np.int64)
    n = np.minimum((length & np.uint32(255)).astype(np.int64), bits)
    raw = a.astype(np.int64) if bits < 64 else a.view(np.uint64).astype(object)
    raw = raw & ((1 << bits) - 1)
    if bits == 64:  # Python numbers: the masks below need 65 bits
        p, n = p.astype(object), n.astype(object)
    field = (raw >> p) & ((np.ones_like(raw) << n) - 1)
    if a.dtype.kind == "i":
        top = np.maximum(np.minimum(p + n - 1, bits - 1), 0)
        sign = np.where(n == 0, 0, (raw >> top) & 1)
        kept = np.maximum(np.minimum(n, bits - p), 0)
        field = np.where(sign == 1, field | (((1 << bits) - 1) ^ ((np.ones_like(raw) << kept) - 1)), field)
    unsigned = np.uint32 if bits == 32 else np.uint64
    return np.array(field & ((1 << bits) - 1), unsigned).view(a.dtype)


def _bfi(a: Array, b: Array, pos: Array, length: Array) -> Array:
    bits = b.dtype.itemsize * 8
    p, n = (pos & np.uint32(255)).astype(np.uint64), (length & np.uint32(255)).astype(np.uint64)
    one = np.uint64(1)
    full = np.uint64(2**64 - 1)
    field = np.where(n >= 64, full, (one << np.minimum(n, np.uint64(63))) - one)
    mask = np.where(p >= 64, np.uint64(0), field << np.minimum(p, np.uint64(63)))
    moved = np.where(p >= 64, np.uint64(0), a.astype(np.uint64) << np.minimum(p, np.uint64(63)))
    out = (b.astype(np.uint64) & ~mask) | (moved & mask)
    return out.astype(b.dtype) if bits == 32 else out


def _popc(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _clz(a: Array) -> Array:
    bits = a.dtype.itemsize * 8
    out = np.full(a.shape, bits, np.uint32)
    nonzero = a != 0
    # frexp is exact enough only below 2^53: take the halves apart.
    high, low = (a >> a.dtype.type(bits // 2)), a & a.dtype.type((1 << (bits // 2)) - 1)
    top = np.where(high != 0, np.frexp(high.astype(np.float64))[1] + bits // 2, np.frexp(low.astype(np.float64))[1])
    return np.where(nonzero, bits - top, out).astype(np.uint32)


def _brev(a: Array) -> Array:
    bits = a.dtype.itemsize * 8
    out = np.zeros_like(a)
    for i in range(bits):
        out |= ((a >> a.dtype.type(i)) & a.dtype.type(1)) << a.dtype.type(bits - 1 - i)
    return out


def _bfind(a: Array) -> Array:
    """Position of the highest bit that is not a sign copy; -1 if there is none."""
    unsigned = np.where(a < 0, ~a, a).astype(np.uint32 if a.dtype.itemsize == 4 else np.uint64)
    return np.uint32(a.dtype.itemsize * 8 - 1) - _clz(unsigned)


def _prmt(a: Array, b: Array, select: Array) -> Array:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, select.shape), np.uint32)
    for i in range(4):
        nibble = (select >> np.uint32(4 * i)) & np.uint32(15)
        byte = ((both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        chosen = np.where(table & np.uint32(1 << i), np.uint32(2**32 - 1), np.uint32(0))
        out |= chosen & (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _dp2a_lo(a: Array, b: Array, c: Array) -> Array:
    """c and the products of the halves of `a`, which have no sign, with the first two bytes of `b`, which have one."""
    low, high = ((b >> np.int32(8 * i)).astype(np.int8).astype(np.int32) for i in range(2))
    halves = a.astype(np.int64) & 0xFFFF, a.astype(np.int64) >> 16
    return (c + halves[0] * low + halves[1] * high).astype(np.int32)


def _widen(a: Array) -> Array:
    return a.astype({"i2": np.int32, "u2": np.uint32, "i4": np.int64, "u4": np.uint64}[a.dtype.kind + str(a.itemsize)])


_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}

for _t in INTS:
    _add(f"add.{_t}", Alu(_t, (_t, _t), np.add, out=True))
    _add(f"sub.{_t}", Alu(_t, (_t, _t), np.subtract, out=True))
    _add(f"mul.lo.{_t}", Alu(_t, (_t, _t), np.multiply, "fma", out=True))
    _add(f"mul.hi.{_t}", Alu(_t, (_t, _t), _mul_hi, "fma"))
    _add(f"mad.lo.{_t}", Alu(_t, (_t, _t, _t), lambda a, b, c: a * b + c, "fma"))
    _add(f"mad.hi.{_t}", Alu(_t, (_t, _t, _t), lambda a, b, c: _mul_hi(a, b) + c, "fma"))
    _add(f"div.{_t}", Alu(_t, (_t, _t), _div))
    _add(f"rem.{_t}", Alu(_t, (_t, _t), _rem))
    _add(f"min.{_t}", Alu(_t, (_t, _t), np.minimum, out=True))
    _add(f"max.{_t}", Alu(_t, (_t, _t), np.maximum, out=True))
    _add(f"shr.{_t}", Alu(_t, (_t, "u32"), _shr))
    if _t[0] == "s":
        _add(f"neg.{_t}", Alu(_t, (_t,), np.negative, out=True))
        _add(f"abs.{_t}", Alu(_t, (_t,), np.absolute, out=True))
    if _t in _WIDE:
        _w = _WIDE[_t]
        _add(f"mul.wide.{_t}", Alu(_w, (_t, _t), lambda a, b: _widen(a) * _widen(b), "fma"))
        _add(f"mad.wide.{_t}", Alu(_w, (_t, _t, _w), lambda a, b, c: _widen(a) * _widen(b) + c, "fma"))
_add("min.relu.s32", Alu("s32", ("s32", "s32"), lambda a, b: np.maximum(np.minimum(a, b), 0)))
_add("max.relu.s32", Alu("s32", ("s32", "s32"), lambda a, b: np.maximum(np.maximum(a, b), 0)))
for _n, _b in _BITS.items():
    _add(f"and.{_b}", Alu(_b, (_b, _b), np.bitwise_and, out=True))
    _add(f"or.{_b}", Alu(_b, (_b, _b), np.bitwise_or, out=True))
    _add(f"xor.{_b}", Alu(_b, (_b, _b), np.bitwise_xor, out=True))
    _add(f"not.{_b}", Alu(_b, (_b,), np.bitwise_not, out=True))
    _add(f"shl.{_b}", Alu(_b, (_b, "u32"), _shl))
    _add(f"shr.{_b}", Alu(_b, (_b, "u32"), _shr))
    for _t in (f"b{_n}", f"u{_n}", f"s{_n}"):
        _add(f"mov.{_t}", Alu(_b, (_b,), np.positive, out=True))
        _add(f"selp.{_t}", Alu(_b, (_b, _b, "p"), lambda a, b, p: np.where(p, a, b)))
for _t in ("s32", "u32", "s64", "u64"):
    _add(f"bfe.{_t}", Alu(_t, (_t, "u32", "u32"), _bfe))
    _add(f"bfind.{_t}", Alu("u32", (_t,), _bfind))
for _b in ("b32", "b64"):
    _add(f"bfi.{_b}", Alu(_b, (_b, _b, "u32", "u32"), _bfi))
    _add(f"popc.{_b}", Alu("u32", (_b,), _popc))
    _add(f"clz.{_b}", Alu("u32", (_b,), _clz))
    _add(f"brev.{_b}", Alu(_b, (_b,), _brev))
_add("prmt.b32", Alu("b32", ("b32", "b32", "b32"), _prmt))
_add("dp2a.lo.u32.s32", Alu("s32", ("u32", "s32", "s32"), _dp2a_lo, "fma"))
_add("lop3.b32", Alu("b32", ("b32", "b32", "b32", "b32"), _lop3))
for _side in ("l", "r"):
    for _how in ("wrap", "clamp"):
        _fn = _shf(_side == "l", _how == "wrap")
        _add(f"shf.{_side}.{_how}.b32", Alu("b32", ("b32", "b32", "u32"), _fn))
_add("not.pred", Alu("p", ("p",), np.logical_not, out=True))
_add("and.pred", Alu("p", ("p", "p"), np.logical_and, out=True))
_add("or.pred", Alu("p", ("p", "p"), np.logical_or, out=True))
_add("xor.pred", Alu("p", ("p", "p"), np.logical_xor, out=True))
_add("mov.pred", Alu("p", ("p",), np.positive))
OPCODES["mov.pred"] = Alu("p", ("p",), lambda p: p)


# --- floats ------------------------------------------------------------------------------------------------


def _fma(a: Array, b: Array, c: Array) -> Array:
    """The product is exact in float64; the sum is rounded twice, which differs from one rounding about 1 in 2^29."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _tanh(a: Array) -> Array:
    return np.tanh(a)


_F32_UNARY: dict[str, tuple[Any, str]] = {
    "neg": (np.negative, "alu"), "abs": (np.absolute, "alu"),
}  # fmt: skip
_APPROX: dict[str, Any] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": _tanh,
    "rsqrt": lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32),
}  # fmt: skip


def _spell(head: str, *options: tuple[str, ...]) -> list[str]:
    """Every way to put the optional modifiers, in order, after a name: head[.rn][.ftz]..."""
    names = [head]
    for option in options:
        names = [n + (f".{o}" if o else "") for n in names for o in option]
    return names


_FTZ = ("", "ftz")
_RND = ("", "rn")
for _name in _spell("add", _RND, _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.add, "fma", out=True))
for _name in _spell("sub", _RND, _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.subtract, "fma", out=True))
for _name in _spell("mul", _RND, _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.multiply, "fma", out=True))
for _name in [*_spell("fma", ("rn",), _FTZ, ("f32",)), "mad.rn.f32", "mad.f32"]:
    _add(_name, Alu("f32", ("f32", "f32", "f32"), _fma, "fma"))
for _name in _spell("div", ("rn", "full", "approx"), _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.divide, "mufu", out=True))
for _name in _spell("min", _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.fmin, out=True))
for _name in _spell("max", _FTZ, ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.fmax, out=True))
for _name in _spell("min", _FTZ, ("NaN",), ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.minimum, out=True))
for _name in _spell("max", _FTZ, ("NaN",), ("f32",)):
    _add(_name, Alu("f32", ("f32", "f32"), np.maximum, out=True))
for _base, (_f, _pipe) in _F32_UNARY.items():
    for _name in _spell(_base, _FTZ, ("f32",)):
        _add(_name, Alu("f32", ("f32",), _f, _pipe, out=True))
for _base, _f in _APPROX.items():
    _kinds = ("approx", "rn") if _base in ("rcp", "sqrt") else ("approx",)
    for _name in _spell(_base, _kinds, _FTZ, ("f32",)):
        _add(_name, Alu("f32", ("f32",), _f, "mufu", out=isinstance(_f, np.ufunc)))
_add("mov.f32", Alu("b32", ("b32",), np.positive, out=True))
_add("selp.f32", Alu("b32", ("b32", "b32", "p"), lambda a, b, p: np.where(p, a, b)))
_add("copysign.f32", Alu("f32", ("f32", "f32"), lambda a, b: np.copysign(b, a)))
for _op, _f in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}.items():
    for _name in _spell(_op, ("", "rn"), ("f64",)):
        _add(_name, Alu("f64", ("f64", "f64"), _f, "fp64", out=True))
_add("fma.rn.f64", Alu("f64", ("f64", "f64", "f64"), lambda a, b, c: a * b + c, "fp64"))
_add("neg.f64", Alu("f64", ("f64",), np.negative, "fp64", out=True))
_add("abs.f64", Alu("f64", ("f64",), np.absolute, "fp64", out=True))
_add("mov.f64", Alu("b64", ("b64",), np.positive, out=True))
_add("selp.f64", Alu("b64", ("b64", "b64", "p"), lambda a, b, p: np.where(p, a, b)))


def _directed(fn: Any, rounding: str) -> Any:
    """`fn` in float64, rounded towards zero (rz), down (rm) or up (rp): one step from the nearest float32 if needed."""

    def run(*operands: Array) -> Array:
        exact = fn(*(x.astype(np.float64) for x in operands))
        near = exact.astype(np.float32)
        down = {"rz": exact > 0, "rm": np.True_, "rp": np.False_}[rounding]
        over = np.where(down, near > exact, near < exact) & np.isfinite(exact)
        return np.where(over, np.nextafter(near, np.where(down, -np.inf, np.inf).astype(np.float32)), near)

    return run


for _rounding in ("rz", "rm", "rp"):
    for _op, _f, _count in (("add", np.add, 2), ("sub", np.subtract, 2), ("mul", np.multiply, 2),
                            ("fma", lambda a, b, c: a * b + c, 3)):  # fmt: skip
        for _name in _spell(f"{_op}.{_rounding}", _FTZ, ("f32",)):
            _add(_name, Alu("f32", ("f32",) * _count, _directed(_f, _rounding), "fma"))


def _mixed(fn: Any, widen: Any) -> Any:
    """`fn` of operands that are 16-bit floats, but for the last."""
    return lambda *operands: fn(*map(widen, operands[:-1]), operands[-1])


for _atype, _to_f32 in {"bf16": bf16_to_f32, "f16": lambda a: a.astype(np.float32)}.items():
    for _op, _f, _count in (("add", np.add, 1), ("sub", np.subtract, 1), ("fma", _fma, 2)):
        for _name in _spell(_op, ("", "rn") if _op != "fma" else ("rn",), ("f32",), (_atype,)):
            _add(_name, Alu("f32", (*(_atype,) * _count, "f32"), _mixed(_f, _to_f32), "fma"))

# Three operands take a row of their own, named by their number.
for _op, _f in {"min": np.fmin, "max": np.fmax, "min.NaN": np.minimum, "max.NaN": np.maximum}.items():
    _head, *_nan = _op.split(".")
    for _name in _spell(_head, _FTZ, tuple(_nan) or ("",), ("f32",)):
        _add(f"{_name}:3", Alu("f32", ("f32",) * 3, lambda a, b, c, f=_f: f(f(a, b), c)))


# --- two 32-bit floats in a register -----------------------------------------------------------------------


def _paired(fn: Any) -> Any:
    return lambda *operands: fn(*(x.view(np.float32) for x in operands)).view(np.uint64)


for _op, _f, _count in (("add", np.add, 2), ("sub", np.subtract, 2), ("mul", np.multiply, 2), ("fma", _fma, 3)):
    for _name in _spell(_op, ("", "rn") if _op != "fma" else ("rn",), _FTZ, ("f32x2",)):
        _add(_name, Alu("b64", ("b64",) * _count, _paired(_f), "fma"))
    for _rounding in ("rz", "rm", "rp"):
        for _name in _spell(f"{_op}.{_rounding}", _FTZ, ("f32x2",)):
            _add(_name, Alu("b64", ("b64",) * _count, _paired(OPCODES[f"{_op}.{_rounding}.f32"].fn), "fma"))


# --- two 16-bit floats in a register -----------------------------------------------------------------------


def _halves(bits: Array, kind: str) -> tuple[Array, Array]:
    low, high = (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)
    if kind == "bf16":
        return bf16_to_f32(low), bf16_to_f32(high)
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


def pack_halves(low: Array, high: Array, kind: str) -> Array:
    """Two float32 arrays to one of packed bf16x2 or f16x2."""
    if kind == "bf16":
        return f32_to_bf16x2(low, high)
    a, b = low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16)
    return a.astype(np.uint32) | (b.astype(np.uint32) << np.uint32(16))


def _packed(kind: str, fn: Any) -> Any:
    def run(*operands: Array) -> Array:
        pairs = [_halves(x, kind) for x in operands]
        low = fn(*(p[0].astype(np.float64) for p in pairs)).astype(np.float32)
        high = fn(*(p[1].astype(np.float64) for p in pairs)).astype(np.float32)
        return pack_halves(low, high, kind)

    return run


def _single(kind: str, fn: Any) -> Any:
    def run(*operands: Array) -> Array:
        if kind == "bf16":
            return f32_to_bf16(fn(*(bf16_to_f32(x).astype(np.float64) for x in operands)).astype(np.float32))
        return fn(*(x.astype(np.float64) for x in operands)).astype(np.float16)

    return run


_ARITH: dict[str, tuple[Any, int]] = {
    "add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "fma": (lambda a, b, c: a * b + c, 3),
    "min": (np.fmin, 2), "max": (np.fmax, 2), "neg": (np.negative, 1), "abs": (np.absolute, 1),
    "ex2.approx": (np.exp2, 1), "tanh.approx": (np.tanh, 1),
}  # fmt: skip
for _op, (_f, _count) in _ARITH.items():
    _pipe = "mufu" if "approx" in _op else "fma"
    for _kind in ("bf16", "f16"):
        for _name in _spell(_op, _RND, _FTZ, (f"{_kind}x2",)):
            _add(_name, Alu("b32", ("b32",) * _count, _packed(_kind, _f), _pipe))
        for _name in _spell(_op, _RND, _FTZ, (_kind,)):
            _add(_name, Alu(_kind, (_kind,) * _count, _single(_kind, _f), _pipe))


# --- comparisons -------------------------------------------------------------------------------------------

_CMP: dict[str, Any] = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
                        "ge": operator.ge}  # fmt: skip
_UFUNC = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
          "ge": np.greater_equal}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BOOL: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _ordered(fn: Any) -> Any:
    return lambda a, b: fn(a, b) & ~(np.isnan(a) | np.isnan(b))


def _unordered(fn: Any) -> Any:
    return lambda a, b: fn(a, b) | np.isnan(a) | np.isnan(b)


def _with(fn: Any, combine: Any) -> Any:
    return lambda a, b, p: combine(fn(a, b), p)


def _compare_rows(t: str) -> dict[str, Any]:
    if t == "bf16":
        return {k: _of_bf16(f) for k, f in _compare_rows("f32").items()}
    if t[0] == "f":
        rows: dict[str, Any] = {k: (_ordered(f) if k == "ne" else f) for k, f in _UFUNC.items()}
        rows |= {k + "u": _unordered(f) for k, f in _UFUNC.items()}
        rows["num"] = lambda a, b: ~(np.isnan(a) | np.isnan(b))
        rows["nan"] = lambda a, b: np.isnan(a) | np.isnan(b)
        return rows
    rows = dict(_UFUNC)
    if t[0] == "u":
        rows |= {k: _UFUNC[v] for k, v in _UNSIGNED.items()}
    return rows


def _of_bf16(fn: Any) -> Any:
    return lambda a, b: fn(bf16_to_f32(a), bf16_to_f32(b))


for _t in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64", "f32", "f64", "f16", "bf16"):
    for _k, _f in _compare_rows(_t).items():
        for _mid in ("", ".ftz") if _t in ("f32", "f16") else ("",):
            _add(f"setp.{_k}{_mid}.{_t}", Alu("p", (_t, _t), _f, out=isinstance(_f, np.ufunc)))
            for _b, _g in _BOOL.items():
                _add(f"setp.{_k}.{_b}{_mid}.{_t}", Alu("p", (_t, _t, "p"), _with(_f, _g)))
for _t in ("s32", "u32", "f32"):
    for _k, _f in _compare_rows(_t).items():
        _add(
            f"set.{_k}.u32.{_t}",
            Alu("u32", (_t, _t), lambda a, b, f=_f: np.where(f(a, b), ~np.uint32(0), np.uint32(0))),
        )


# --- conversions -------------------------------------------------------------------------------------------

_ROUND: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _int_to_int(to: str) -> Any:
    dtype = DTYPES[to]
    return lambda a: a.astype(dtype)


def _to_int(to: str, rounding: Any) -> Any:
    info = np.iinfo(DTYPES[to])

    def run(a: Array) -> Array:
        x = rounding(np.where(np.isnan(a), 0, a).astype(np.float64))
        out = np.clip(x, float(info.min), float(info.max))
        # float(info.max) of 64-bit types rounds up: those come back saturated by hand.
        big = x >= float(info.max)
        return np.where(big, info.max, np.where(big, 0, out).astype(DTYPES[to])).astype(DTYPES[to])

    return run


def _int_to_bf16(a: Array) -> Array:
    """Rounded once: to 24 bits of which the last one says if anything was cut, which float32 holds, then to 8."""
    wide = a.astype(np.int64 if a.dtype.kind == "i" else np.uint64)
    size = np.where(wide < 0, -wide, wide).astype(np.uint64)
    cut = np.maximum(np.int64(40) - _clz(size).astype(np.int64), 0).astype(np.uint64)
    kept = size >> cut
    kept |= (kept << cut != size).astype(np.uint64)
    magnitude = np.ldexp(kept.astype(np.float32), cut.astype(np.int32))
    return f32_to_bf16(np.where(wide < 0, -magnitude, magnitude).astype(np.float32))


def _from_bf16(fn: Any) -> Any:
    return lambda a: fn(bf16_to_f32(a))


_ALL_INTS = ("s8", "u8", *INTS)
for _to in _ALL_INTS:
    for _from in _ALL_INTS:
        _add(f"cvt.{_to}.{_from}", Alu(_to, (_from,), _int_to_int(_to)))
    for _from in ("f32", "f64", "f16"):
        for _r, _f in _ROUND.items():
            for _mid in ("", ".ftz"):
                _add(f"cvt.{_r}{_mid}.{_to}.{_from}", Alu(_to, (_from,), _to_int(_to, _f), "xu"))
    for _r, _f in _ROUND.items():
        _add(f"cvt.{_r}.{_to}.bf16", Alu(_to, ("bf16",), _from_bf16(_to_int(_to, _f)), "xu"))
for _from in _ALL_INTS:
    for _to in ("f32", "f64", "f16"):
        _add(f"cvt.rn.{_to}.{_from}", Alu(_to, (_from,), lambda a, d=DTYPES[_to]: a.astype(d), "xu"))
    _add(f"cvt.rn.bf16.{_from}", Alu("bf16", (_from,), _int_to_bf16, "xu"))
for _r, _f in _ROUND.items():
    for _mid in ("", ".ftz"):
        _add(f"cvt.{_r}{_mid}.f32.f32", Alu("f32", ("f32",), _f, "xu"))
for _mid in ("", ".ftz"):
    _add(f"cvt{_mid}.f32.f16", Alu("f32", ("f16",), lambda a: a.astype(np.float32)))
    _add(f"cvt.rn{_mid}.f16.f32", Alu("f16", ("f32",), lambda a: a.astype(np.float16)))
    _add(f"cvt{_mid}.sat.f32.f32", Alu("f32", ("f32",), lambda a: np.clip(np.where(np.isnan(a), 0, a), 0, 1)))
_add("cvt.f64.f32", Alu("f64", ("f32",), lambda a: a.astype(np.float64), "fp64"))
_add("cvt.rn.f32.f64", Alu("f32", ("f64",), lambda a: a.astype(np.float32), "fp64"))
_add("cvt.f32.bf16", Alu("f32", ("bf16",), bf16_to_f32))
_add("cvt.rn.bf16.f32", Alu("bf16", ("f32",), f32_to_bf16))
_add("cvt.rn.bf16x2.f32", Alu("b32", ("f32", "f32"), lambda hi, lo: pack_halves(lo, hi, "bf16")))
_add("cvt.rn.f16x2.f32", Alu("b32", ("f32", "f32"), lambda hi, lo: pack_halves(lo, hi, "f16")))
