"""Short vectors in a mod: rows of captured tensors, unrolled into the scalars that they are made of.

Whatever a mod does to a vector is done to its elements, so graph, analysis, gradients and kernels know scalars alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import errors
from .refusals import pending, refuse

LONGEST = 32  # each element is a read of its own: so many per pair make a slow kernel already, compiled in seconds


class Several:
    """More than one number: what waits for a reduction over its last dimension."""

    def vector(self) -> Vector:
        """Its elements. Refused where it has further dimensions, or too many elements."""
        raise NotImplementedError


class Vector(Several):
    """Traced numbers side by side; of one element where it stands beside longer ones, as torch broadcasts."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self.elements = tuple(elements)

    def vector(self) -> Vector:
        return self

    def __len__(self) -> int:
        return len(self.elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, tuple) and len(item) == 2 and item[0] is Ellipsis:
            item = item[1]
        if isinstance(item, slice):
            return Vector(self.elements[item])
        if isinstance(item, int) and not isinstance(item, bool):
            if -len(self) <= item < len(self):
                return self.elements[item]
            return refuse(errors.ConstantIndexOutOfRange, f"element {item} of a vector of {len(self)}")
        return refuse(
            errors.UnindexedTensor,
            "a vector that a mod computes is read at constant positions only; compute it outside the mod and capture "
            "the result, or choose by torch.where(h == 0, x, y)",
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self),))

    ndim = property(lambda self: 1)
    dtype = property(lambda self: self.elements[0].dtype)
    device = property(lambda self: self.elements[0].device)

    def dim(self) -> int:
        return 1

    def numel(self) -> int:
        return len(self)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Vector:
        return lift(lambda x: x.to(*args, **kwargs), self)

    def __repr__(self) -> str:
        return f"Vector({', '.join(map(repr, self.elements))})"


def lift(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Vector:
    """`function` of scalars, element by element of the vectors among its arguments."""
    count = 1
    for given in (*args, *kwargs.values()):
        if isinstance(given, Vector) and len(given) != 1:
            if count not in (1, len(given)):
                refuse(errors.UnsupportedOperation, f"vectors of {count} and of {len(given)} numbers don't go together")
            count = len(given)

    def element(given: Any, i: int) -> Any:
        return given.elements[i if len(given) > 1 else 0] if isinstance(given, Vector) else given

    return Vector(
        [
            function(*(element(a, i) for a in args), **{k: element(a, i) for k, a in kwargs.items()})
            for i in range(count)
        ]
    )


# --- reductions over the last dimension ---------------------------------------------------------------------------


def _folded(join: Callable[[Any, Any], Any], elements: Sequence[Any]) -> Any:
    """Joined in pairs: shallow graphs, and sums that round less than one after the other."""
    while len(elements) > 1:
        pairs = [join(x, y) for x, y in zip(elements[::2], elements[1::2], strict=False)]
        elements = pairs + list(elements[len(pairs) * 2 :])
    return elements[0]


def _extreme(join: Callable[[Any, Any], Any], x: Vector) -> Any:
    """The largest (least) element; all that are equal to it have even parts of its gradient, as in torch.

    Joined in pairs, two have; of three, the last one would have half. Where nobody asks for gradients, pairs will do.
    """
    found = _folded(join, x.elements)
    if not found.is_floating_point() or len(x) < 3 or getattr(pending, "nodes", None) is None:
        return found
    alike = [e == found for e in x]
    return _sum(Vector([torch.where(a, e, 0.0) for a, e in zip(alike, x, strict=True)])) / _sum(Vector(alike))


def _sum(x: Vector) -> Any:
    """Bools count in 32 bits, and narrower integers add in 64, as in torch."""
    return _folded(operator.add, [e.int() if e.dtype is torch.bool else _wide(e) for e in x])


def _wide(element: Any) -> Any:
    return element if element.is_floating_point() else element.long()


def _mean(x: Vector) -> Any:
    if not x.elements[0].is_floating_point():
        refuse(errors.TypeMismatch, "mean of integers; make them floats first: .float().mean(-1)")
    return _sum(x) / len(x)


def _norm(x: Vector, p: Any = 2) -> Any:
    if p in (1, 1.0):
        return _sum(lift(abs, x))
    if p == math.inf:
        return _OVER_ONE["amax"](lift(abs, x))
    if p not in (None, 2, 2.0, "fro"):
        refuse(errors.UnsupportedOperation, f"a norm of order {p!r}; there are 1, 2 and inf")
    squares = _sum(lift(lambda e: e * e, x))
    zero = squares == 0  # torch's gradient of the norm of zeros is 0, not that of the root
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


def _dot(x: Vector, y: Vector) -> Any:
    if len(x) != len(y):
        refuse(errors.UnsupportedOperation, f"the product of vectors of {len(x)} and of {len(y)} numbers")
    return _sum(lift(operator.mul, x, y))


def _bools(x: Vector) -> Sequence[Any]:
    return lift(lambda e: e.bool(), x).elements


_OVER_ONE: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "prod": lambda x: _folded(operator.mul, [_wide(e) for e in x]),
    "any": lambda x: _folded(operator.or_, _bools(x)),
    "all": lambda x: _folded(operator.and_, _bools(x)),
    "count_nonzero": lambda x: _sum(lift(lambda e: e != 0, x)),
    "amax": lambda x: _extreme(lambda a, b: a.maximum(b), x),
    "amin": lambda x: _extreme(lambda a, b: a.minimum(b), x),
}
_NORMS = {"norm": "p", "linalg_vector_norm": "ord", "linalg_norm": "ord"}  # and what they call their order
_PRODUCTS = ("dot", "vdot", "inner", "matmul", "linalg_vecdot")

REDUCTIONS = {*_OVER_ONE, *_NORMS, *_PRODUCTS, "max", "min", "isin"}


def reduce(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The reduction `name` over the last dimension, of vectors."""
    named = {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): value for k, value in kwargs.items()}
    keep, dims, dtype = bool(named.pop("keepdim", False)), [named.pop("dim", None)], named.pop("dtype", None)
    x, *more = args
    if name in _PRODUCTS:
        found = _dot(x, more.pop(0) if more else named.pop("y"))
    elif name == "isin":
        found = _folded(operator.or_, lift(operator.eq, more.pop(0), x).elements)
    elif name in _NORMS:
        found = _norm(x, named.pop(_NORMS[name], more.pop(0) if more else 2))
    elif name in ("max", "min"):
        if more or dims != [None]:
            return refuse(
                errors.ReductionInMod, f"{name} over a dimension gives positions too; write .a{name}(-1) for the value"
            )
        found = _OVER_ONE[f"a{name}"](x)
    else:
        found = _OVER_ONE[name](x if dtype is None else x.to(dtype))
    dims += more
    if named or not all(d in (None, -1, 0, (-1,), [-1], (0,), [0]) for d in dims):
        refuse(errors.UnsupportedOperation, f"{name} with these arguments; a vector has the dimension -1 alone")
    return Vector([found]) if keep else found


def refuse_length(count: int) -> Any:
    """Refuses a row of too many numbers."""
    return refuse(
        errors.UnindexedTensor,
        f"a row of {count} numbers is used whole; a mod takes rows of up to {LONGEST}, and unrolls them. Was one "
        "number meant? Then an index is missing: tensor[q_idx, kv_idx]. Else compute what it needs of the row outside "
        "and capture the result; blocks of keys that a model picks are a mask of their own: "
        "ca.BlockSparse.topk(indices, block, q_len, kv_len)",
    )
