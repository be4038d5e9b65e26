"""What the ready mods accept as arguments: numbers, run-time scalars, and tensors by head or by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import InvalidModArgument, UnsupportedTransform
from ..graph.among import among_form
from ..graph.dynamo import is_traced
from ..graph.expr import DType, has_no_shape
from ..graph.proxies import Symbolic
from ..graph.scalar import Scalar
from ..graph.sizes import surely
from .mod import Mod

Number = int | float | Scalar | torch.Tensor
At = Callable[[Any], Any]
"""What an argument is at an index expression (a head, a batch): itself, or its element there."""


def integer(value: Any, name: str, minimum: int = 0, others: str = "") -> int:
    """A Python int of at least `minimum`; `others`: what else would be taken, for who gives neither."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidModArgument(f"{name} must be a Python int{others}, got {_what(value)}")
    if value < minimum:
        raise InvalidModArgument(f"{name} must be at least {minimum}, got {value}")
    return value


def positive(value: Any, name: str) -> Any:
    """A finite number above zero, or a run-time scalar or 0-d float tensor whose value is the caller's matter."""
    if isinstance(value, torch.Tensor):
        return tensor(value, name, "float", ())
    if isinstance(value, Symbolic):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidModArgument(f"{name} must be a number, ca.scalar or a 0-d tensor, got {_what(value)}")
    if not 0 < value < math.inf:
        raise InvalidModArgument(f"{name} must be finite and above 0, got {value}")
    return value


def count_at(value: Any, name: str, axis: str) -> At:
    """A count: one for all (int, `ca.scalar`, 0-d tensor), or one for each `axis` (1-D int tensor)."""
    if isinstance(value, torch.Tensor):
        tensor(value, name, "integer", (), (axis,))
        return (lambda i: value[i]) if value.ndim else (lambda i: value)
    if isinstance(value, Symbolic):
        if not value.expr.dtype.is_integer:
            raise InvalidModArgument(f"{name} must be an integer, got a scalar of type {value.expr.dtype.value}")
        return lambda i: value
    integer(value, name, others=f", a ca.scalar, or a tensor of integers, () or ({axis},)")
    return lambda i: value


_KINDS: dict[str, tuple[str, Callable[[DType], bool]]] = {
    "integer": ("integers", lambda t: t.is_integer),
    "float": ("floats", lambda t: t is DType.FLOAT),
    "bool": ("bools", lambda t: t is DType.BOOL),
}


def tensor(value: Any, name: str, kind: str, *shapes: tuple[str, ...]) -> torch.Tensor:
    """`value` itself (never a copy: gradients go to the caller's tensor), checked for type and rank.

    `shapes` names the dimensions of every rank that is taken, e.g. `("H",), ("B", "H")`.
    """
    plural, accepts = _KINDS[kind]
    if not isinstance(value, torch.Tensor) or has_no_shape(value):
        raise InvalidModArgument(f"{name} must be a tensor of {plural}, shape {_named(shapes)}, got {_what(value)}")
    if not accepts(DType.of(value.dtype)):
        raise InvalidModArgument(f"{name} must hold {plural}, got {value.dtype}")
    if value.ndim not in [len(shape) for shape in shapes]:
        raise InvalidModArgument(f"{name} must have shape {_named(shapes)}, got {tuple(value.shape)}")
    if any(surely(size == 0) for size in value.shape):
        raise InvalidModArgument(f"{name} must not be empty, got shape {tuple(value.shape)}")
    return value


def _named(shapes: Sequence[tuple[str, ...]]) -> str:
    return " or ".join(f"({', '.join(s)}{',' if len(s) == 1 else ''})" if s else "()" for s in shapes)


def sequence(value: Any, name: str) -> list[Any]:
    """The items of a list or tuple."""
    if not isinstance(value, Sequence):
        raise InvalidModArgument(f"{name} must be a list or tuple with an item for each axis, got {_what(value)}")
    return list(value)


def choice(value: Any, name: str, *options: str) -> str:
    """One of `options`."""
    if not isinstance(value, str) or value not in options:
        raise InvalidModArgument(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def offsets_of(value: Any, name: str) -> torch.Tensor:
    """Document offsets (0, n1, n1 + n2, ..., total), as int64; reading them waits for the device once."""
    tensor(value, name, "integer", ("documents + 1",))
    refuse_contents_in_a_region(name)
    if len(value) < 2:
        raise InvalidModArgument(f"{name} must hold at least 2 offsets (0 and the total), got {len(value)}")
    wide = value.detach().to(torch.int64)
    if bool((wide[0] != 0) | (wide[1:] < wide[:-1]).any()):
        raise InvalidModArgument(f"{name} must begin with 0 and never fall, e.g. [0, 5, 9] for lengths 5 and 4")
    if not 0 < int(wide[-1]) < 2**31:
        raise InvalidModArgument(f"{name} end with {int(wide[-1])}; all documents together have 1 to 2^31 - 1 tokens")
    return wide


def refuse_contents_in_a_region(name: str) -> None:
    """Raises `UnsupportedTransform` where Dynamo follows the making of a mod that looks at what a tensor holds."""
    if is_traced():
        raise UnsupportedTransform(
            f"{name} are read when the mask is made, which no code does that torch compiles as one graph; make the "
            "mask before and pass it in, or say the same by a tensor with an entry for each position: document(ids)"
        )


def _what(value: Any) -> str:
    if has_no_shape(value):
        return "a lazy parameter; run its module once before"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """A short name of an argument, for the mod's own name, which matters for nothing while compiling."""
    if torch.compiler.is_compiling():
        return ""
    if isinstance(value, torch.Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, Scalar):
        return "ca.scalar"  # not what it says now
    return ", ".join(map(shown, value)) if isinstance(value, tuple) else str(value)


def aligned(align: str) -> At:
    """A query's position as keys count: itself, or behind Skv - Sq of them where both end together."""
    if choice(align, "align", "top_left", "bottom_right") == "top_left":
        return lambda q: q
    return lambda q: _FROM_THE_END.at({"q": q}, {})


def counted(axis: str, count: int | None) -> At:
    """An index "b" or "h" that counts among so many, see `graph.among`."""
    said = Mod.formed(among_form(axis, count), (), "among")
    return lambda i: said.at({axis: i}, {})


# forms, as inside of a compiled region no graph can be made
_FROM_THE_END = Mod.formed(
    "('steps', 0, (('op:sub', None, 'kv_len', 'q_len'), ('op:add', None, 'q', 'x0')), 'x1')", (), "from the end"
)
