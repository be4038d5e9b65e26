"""`ca.scalar`: numbers that a kernel receives at run time, so that a new value never recompiles."""

from __future__ import annotations

import itertools
import numbers
import threading
import weakref
from typing import Any

from .. import errors
from .dynamo import is_traced
from .expr import Dep, DType, Expr, make
from .proxies import Symbolic


def _is_number(value: Any) -> bool:
    """A Python int or float, or a number of numpy's; other kinds (Fraction) are no numbers of a kernel."""
    return isinstance(value, (int, float)) or (isinstance(value, numbers.Real) and hasattr(value, "item"))


def _refuse_traced(scalar: Scalar) -> None:
    """Compiled code writes to objects when all of its operators have run, which would read the number of before.

    Other kinds than a user's are given to operators as they are.
    """
    if is_traced() and scalar.__class__ is Scalar:
        raise errors.UnsupportedCapture(
            "a ca.scalar is made or set in a compiled region; do it outside, or capture the number itself, or a 0-d "
            "tensor"
        )


class Scalar(Symbolic):
    """A run-time number: a new value never recompiles. Made by `ca.scalar(x)`; set `.value` to change it.

    The tiles of a kernel are chosen by the value of a plan's first call, and stay. What they visit follows the value.

    An int has 32 bits, 64 where it begins beyond 32. Raises: `UnsupportedCapture` for what its type can't hold.
    """

    __slots__ = ("_expr", "_number", "number")

    in_graphs: str | None = "a ca.scalar, for which a captured 0-d tensor on q's device can stand,"
    """What it is to a CUDA graph, which replays the number that the host read; None where that is the call's own."""

    _expr: Expr
    _number: float | int
    number: int  # by which compiled code knows it, in this process

    def __init__(self, value: float | int) -> None:
        _refuse_traced(self)
        if isinstance(value, bool) or not _is_number(value):
            raise errors.UnsupportedCapture(
                f"ca.scalar takes a Python int or float, got {type(value).__name__}; "
                "a 0-d tensor can be captured as it is"
            )
        kind = DType.FLOAT
        if isinstance(value, numbers.Integral):
            kind = DType.INT32 if -(2**31) <= value < 2**31 else DType.INT64
        self._expr = make("scalar", (), kind, self, Dep.RUNTIME)
        self.number = next(_scalar_numbers)
        _scalars[self.number] = self
        self.value = value

    @property
    def value(self) -> float | int:
        return self._number

    @value.setter
    def value(self, value: float | int) -> None:
        _refuse_traced(self)
        whole = isinstance(value, numbers.Integral)
        if isinstance(value, bool) or not _is_number(value) or (self._expr.dtype.is_integer and not whole):
            raise errors.UnsupportedCapture(
                f"a scalar of type {self._expr.dtype.value} got {value!r}; its kernels are made for that type: "
                "make a new ca.scalar, or begin with a float"
            )
        bits = {DType.INT32: 32, DType.INT64: 64}.get(self._expr.dtype)
        if bits is not None and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise errors.UnsupportedCapture(
                f"{value} does not fit into the {bits} bits that this scalar's kernels are made for; "
                + ("begin with a number beyond 32 bits for one of 64" if bits == 32 else "make it a float")
            )
        self._number = _finite(value) if bits is None else int(value)

    @property
    def expr(self) -> Expr:
        return self._expr

    def composattn_fingerprint(self) -> tuple[str, tuple[Any, ...]]:
        """What a mod that reads it depends on besides its value; see `graph.fingerprint`."""
        return self._expr.dtype.value, (self,)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._number,)

    def __repr__(self) -> str:
        return f"ca.scalar({self.value!r})"


class LocalScalar(Scalar):
    """A run-time number with a value per thread: that of its call."""

    __slots__ = ("_local",)

    in_graphs: str | None = None

    def __init__(self, value: int) -> None:
        self._local = threading.local()
        super().__init__(value)

    @property
    def _number(self) -> int:  # type: ignore[override]
        return getattr(self._local, "number", 0)

    @_number.setter
    def _number(self, number: int) -> None:
        self._local.number = number


_scalar_numbers = itertools.count()
_scalars: weakref.WeakValueDictionary[int, Scalar] = weakref.WeakValueDictionary()


def scalar_of(number: int) -> Scalar:
    """The run-time number of this number in this process. Raises: `ScalarGone`."""
    found = _scalars.get(number)
    if found is None:
        raise errors.ScalarGone(
            "compiled code reads a ca.scalar that is gone; keep a reference to it, or capture a 0-d tensor"
        )
    return found


def _finite(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise errors.UnsupportedCapture(
            f"a scalar of type {value.__class__.__name__} is larger than any float; give a float"
        ) from None
