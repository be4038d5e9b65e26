"""A mod as mathematics: a sympy expression where one exists, a line of text and LaTeX in any case."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..graph.expr import Capture, DType, Expr, captures, scalars, score, walk
from ..graph.gradient import derivative, partials
from ..graph.linear import FAR
from ..graph.ops import OPS
from .derived import Derived
from .saturated import is_guarded

_LENGTHS = {"q_len": "Sq", "kv_len": "Skv"}


class Names:
    """What captured tensors and run-time scalars are called: t0, t1, ... and c0, c1, ... in order of appearance."""

    def __init__(self, *roots: Expr) -> None:
        self._tensors = {c: f"t{n}" for n, c in enumerate(captures(*roots))}
        self._scalars = {id(s): f"c{n}" for n, s in enumerate(scalars(*roots))}

    def tensor(self, capture: Capture) -> str:
        return self._tensors[capture]

    def scalar(self, holder: Any) -> str:
        return self._scalars[id(holder)]

    def legend(self) -> dict[str, str]:
        """{name: dtype and shape} of the captured tensors."""
        return {
            name: f"{str(c.tensor.dtype).removeprefix('torch.')}{list(c.tensor.shape)}{self._origin(c)}"
            for c, name in self._tensors.items()
        }

    def _origin(self, capture: Capture) -> str:
        """For a table that the analysis derived: the tensors it comes from."""
        found, sources = [], list(getattr(capture, "sources", ()))
        for source in sources:
            if source in self._tensors:
                found.append(self._tensors[source])
            else:
                sources += getattr(source, "sources", ())
        return f" from {', '.join(dict.fromkeys(found))}" if found else ""


# --- sympy ----------------------------------------------------------------------------------------------------


def to_sympy(expr: Expr, names: Names | None = None) -> Any | None:
    """`expr` over the reals and integers, or None where an operation has no such meaning.

    Captured tensors become indexed symbols. Float behaviour (rounding, infinities, NaN) is not part of it: it is for
    reading and for algebra whose result is checked, never to generate code from.
    """
    names = names or Names(expr)
    done: dict[Expr, Any] = {}
    for node in walk(expr):
        args = [done[a] for a in node.args]
        if any(a is None for a in args):
            done[node] = None
            continue
        done[node] = _sympy_leaf(node, args, names) if node.op in _LEAVES else _sympy_operation(node, args)
    return done[expr]


_LEAVES = ("const", "index", "score", "scalar", "size", "read")


def _sympy_leaf(node: Expr, args: list[Any], names: Names) -> Any:
    import sympy  # here and below: importing the package need not wait for it

    if node.op == "const":
        if node.dtype is DType.BOOL:
            return sympy.true if node.attr else sympy.false
        return sympy.nsimplify(node.attr) if _is_short(node.attr) else sympy.sympify(node.attr)
    if node.op == "index":
        return sympy.Symbol(_LENGTHS.get(node.attr, node.attr), integer=True, nonnegative=True)
    if node.op == "score":
        return sympy.Symbol("s", real=True)
    if node.op == "scalar":
        return sympy.Symbol(names.scalar(node.attr), real=True, integer=node.dtype.is_integer or None)
    name = names.tensor(node.attr)
    if node.op == "size":
        return sympy.Symbol(f"{name}.size({args[0]})", integer=True, positive=True)
    if node.dtype is DType.BOOL:
        return sympy.Ne(_indexed(name, args), 0)
    return _indexed(name, args)


def _is_short(value: float) -> bool:
    """Whether a number is an infinity or has at most ten binary digits behind the point: 0.5 is printed as 1/2."""
    return math.isinf(value) or (math.isfinite(value) and (value * 1024) % 1 == 0)


def _indexed(name: str, args: list[Any]) -> Any:
    import sympy

    return sympy.IndexedBase(name, real=True)[tuple(args)] if args else sympy.Symbol(name, real=True)


def _sympy_operation(node: Expr, args: list[Any]) -> Any | None:
    row = OPS[node.op].sympy
    if row is None or (node.op in ("cast_int32", "cast_int64", "cast_bool") and node.args[0].dtype is DType.FLOAT):
        return None
    bits = node.op in ("and", "or", "xor", "not") and node.dtype is not DType.BOOL
    logic = node.op in ("add", "mul", "sub") and any(a.dtype is DType.BOOL for a in node.args)
    if bits or logic:
        return None
    try:
        return row(*args)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError):  # arguments of the wrong kind, or x % 0
        return None


def latex(expr: Expr, names: Names | None = None) -> str:
    """`expr` as LaTeX; as typewriter text where it is no formula over the reals, or too long for one."""
    text = formula(expr, names)
    found = None if _ELIDED in text or len(text) > _LONGEST_LATEX else to_sympy(expr, names)
    if found is None:
        return rf"\texttt{{{text.translate(_ESCAPED)}}}"
    import sympy

    return str(sympy.latex(found))


def definition(root: Expr) -> str:
    """A mask as LaTeX; a score mod with its derivatives by the score and by each captured number that it reads."""
    if root.dtype is DType.BOOL:
        return latex(root)
    by = {score(): derivative(root), **partials(root)}
    names = Names(root, *by.values())
    lines = [rf"{_CHANGED} &= {latex(root, names)}"]
    for leaf, d in by.items():
        lines.append(rf"\frac{{\partial {_CHANGED}}}{{\partial {latex(leaf, names)}}} &= {latex(d, names)}")
    return r"\begin{aligned} " + r" \\ ".join(lines) + r" \end{aligned}"


_CHANGED = r"\mathrm{score\_mod}"
_ESCAPED = {ord(c): f"\\{c}" for c in "&%#_{}$"} | {ord("·"): r"$\cdot$", ord("~"): r"\textasciitilde "}


# --- text ------------------------------------------------------------------------------------------------------

_INFIX = {
    "or": ("|", 1), "xor": ("^", 2), "and": ("&", 3), "eq": ("==", 5), "ne": ("!=", 5), "lt": ("<", 5), "le": ("<=", 5),
    "gt": (">", 5), "ge": (">=", 5), "lshift": ("<<", 6), "rshift": (">>", 6), "add": ("+", 7), "sub": ("-", 7),
    "mul": ("·", 8), "div": ("/", 8), "floordiv": ("//", 8), "mod": ("%", 8), "pow": ("**", 10),
}  # fmt: skip
_CALLED = {
    "maximum": "max", "minimum": "min", "clamp_min": "max", "clamp_max": "min", "cast_bool": "bool",
    "cast_int32": "int", "cast_int64": "int", "cast_float16": "half", "cast_bfloat16": "bfloat16",
}  # fmt: skip
_ASSOCIATIVE = {"add", "mul", "and", "or"}
_ATOM = 11
_LONGEST_LATEX = 400  # sympy takes seconds for more
_LONGEST, _ELIDED = 2000, "…"  # parts that a graph shares are spelled each time: without a bound, text would explode


def formula(expr: Expr, names: Names | None = None) -> str:
    """`expr` in one line, with s for the score: `s + t0[h]·(q - kv)`."""
    names = names or Names(expr)
    done: dict[Expr, tuple[str, int]] = {}
    for node in walk(expr):
        text, binding = _extreme(node, done, names) or _text(node, [done[a] for a in node.args], names)
        done[node] = (text, binding) if len(text) <= _LONGEST else (_ELIDED, _ATOM)
    return done[expr][0]


def read_in_words(read: Expr) -> str:
    """Which tensor a read reads, and where: `a captured tensor of shape (4, 128) is read at [h, q - kv]`."""
    names = Names(*read.args)
    place = ", ".join(formula(index, names) for index in read.args)
    return f"a captured tensor of shape {tuple(read.attr.tensor.shape)} is read at [{place}]"


def _extreme(node: Expr, done: dict[Expr, tuple[str, int]], names: Names) -> tuple[str, int] | None:
    """What `derived.range_extreme` builds, as the least or largest of a run of elements: `min(t1[first..last])`.

    Two reads of one table, at the run's begin and at a window's length before its end, both at most the last element.
    """
    if node.op not in ("minimum", "maximum") or not all(a.op == "read" for a in node.args):
        return None
    x, y = node.args
    moving = [n for n, (i, j) in enumerate(zip(x.args, y.args, strict=False)) if i is not j]
    if x.attr is not y.attr or not isinstance(x.attr, Derived) or len(moving) != 1 or not moving[0]:
        return None
    last = _last_of(y.args[moving[0]])
    if last is None:
        return None
    ends = [done[_inside_table(e)][0] for e in (x.args[moving[0]], last)]
    inner = ["..".join(ends) if n == moving[0] else done[i][0] for n, i in enumerate(x.args) if n]
    return f"{_CALLED[node.op]}({names.tensor(x.attr)}[{', '.join(inner)}])", _ATOM


def _inside_table(e: Expr) -> Expr:
    """A position without the bound that keeps it in the table."""
    return e.args[0] if e.op == "minimum" else e


def _last_of(window: Expr) -> Expr | None:
    """The last element of the run at whose end a window begins there."""
    window = window.args[0] if window.op == "maximum" else window
    if window.op != "sub" or window.args[0].op != "add" or window.args[1].op != "lshift":
        return None
    return window.args[0].args[0]


def _text(node: Expr, args: list[tuple[str, int]], names: Names) -> tuple[str, int]:
    """The text of a node and how tightly it binds."""
    inner = [text for text, _ in args]
    if node.op == "const":
        return _number(node), _ATOM if node.dtype is DType.BOOL or node.attr >= 0 else 9
    if node.op in _TEXT_OF:
        return _TEXT_OF[node.op](node, inner, names), _ATOM
    if node.op in _INFIX:
        return _infix(node, args)
    if node.op in _PREFIX:
        return f"{_PREFIX[node.op]}{_inside(args[0], 9)}", 9
    if node.op == "abs":
        return f"|{inner[0]}|", _ATOM
    shown = _stands_for(node)
    return args[shown] if shown is not None else (f"{_CALLED.get(node.op, node.op)}({', '.join(inner)})", _ATOM)


_TEXT_OF: dict[str, Callable[[Expr, list[str], Names], str]] = {
    "index": lambda node, inner, names: _LENGTHS.get(node.attr, node.attr),
    "score": lambda node, inner, names: "s",
    "scalar": lambda node, inner, names: names.scalar(node.attr),
    "size": lambda node, inner, names: f"{names.tensor(node.attr)}.size({inner[0]})",
    "read": lambda node, inner, names: names.tensor(node.attr) + (f"[{', '.join(inner)}]" if inner else ""),
}
_PREFIX = {"neg": "-", "not": "~"}


def _infix(node: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
    op, (sign, binding) = node.op, _INFIX[node.op]
    # 32·(q // 32), not 32·q // 32, which would be q
    whole = [op == "mul" and a.op in ("floordiv", "mod") for a in node.args]
    left = _inside(args[0], binding + (op == "pow" or binding == 5 or whole[0]))
    right = _inside(args[1], binding + ((op not in _ASSOCIATIVE and op != "pow") or whole[1]))
    if op == "add" and right.startswith("-"):
        return f"{left} - {right[1:]}", binding  # q + -80
    return f"{left}{sign}{right}" if op in ("mul", "pow") else f"{left} {sign} {right}", binding


def _stands_for(node: Expr) -> int | None:
    """The argument that a reader takes a node for: casts that keep the number, bounds that keep reads inside."""
    op = node.op
    if op in ("cast_float", "scale") or (op == "cast_int64" and node.args[0].dtype.is_integer):
        return 0
    if op == "cast_int32" and _is_clamp(node.args[0]):  # `linear.finish`
        return 0
    if op in ("clamp_min", "clamp_max") and _is_clamp(node):
        return 0
    return 2 if is_guarded(node) else None


def _is_clamp(node: Expr) -> bool:
    """Whether `node` keeps a number inside of 32 or 64 bits, which of a position changes nothing."""
    if node.op not in ("clamp_min", "clamp_max") or not node.args[1].is_const or not node.dtype.is_integer:
        return False
    return bool(node.args[1].attr <= -FAR if node.op == "clamp_min" else node.args[1].attr >= FAR)


def _inside(part: tuple[str, int], binding: int) -> str:
    text, own = part
    return text if own >= binding else f"({text})"


def _number(node: Expr) -> str:
    if node.dtype is not DType.FLOAT:
        return str(node.attr)
    special = {float("inf"): "inf", -float("inf"): "-inf"}
    return special.get(node.attr, f"{node.attr:.6g}")
