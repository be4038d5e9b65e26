"""Products and sums of a thread's fp32 elements: one by one, or two per instruction on GPUs that can do that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import math as cm

from .lanes import add
from .values import Fixed

CHAINS = 4  # independent partial maxima and sums, so that latency overlaps


class Arithmetic(Protocol):
    """How elements are multiplied and added; the order of sums is its own."""

    def scaled(self, values: Iterable[Any], factor: Any, shift: Any) -> Iterable[Any]:
        """Each times `factor`, less `shift`."""

    def times(self, values: Sequence[Any], factor: Any) -> Iterable[Any]:
        """Each times `factor`."""

    def multiples(self, step: Any, count: int) -> Sequence[Any]:
        """`step` times 0, 1, 2, ...; `count` of them, a power of two."""

    def times_plus(self, values: Sequence[Any], factor: Any, added: Sequence[Any]) -> Iterable[Any]:
        """Each times `factor`, plus its own of `added`."""

    def total(self, first: Any, values: Sequence[Any]) -> Any:
        """The sum of all, and of `first` unless that is None."""


class OneByOne(Fixed):
    def multiples(self, step: Any, count: int) -> Sequence[Any]:
        return [step * float(i) for i in range(count)]

    def times_plus(self, values: Sequence[Any], factor: Any, added: Sequence[Any]) -> Iterable[Any]:
        return (cm.fma(value, factor, more) for value, more in zip(values, added, strict=True))

    def scaled(self, values: Iterable[Any], factor: Any, shift: Any) -> Iterable[Any]:
        return (value * factor - shift for value in values)

    def times(self, values: Sequence[Any], factor: Any) -> Iterable[Any]:
        return (value * factor for value in values)

    def total(self, first: Any, values: Sequence[Any]) -> Any:
        return tree(add, chains(add, values if first is None else [first, *values]))


class InPairs(Fixed):
    """Neighbours are a pair; they are even in number."""

    def multiples(self, step: Any, count: int) -> Sequence[Any]:
        # a pair takes no immediates: those that there are, moved by as many, are the next ones
        found = [(Float32(0.0), step)]
        while 2 * len(found) < count:
            more = step * float(2 * len(found))
            found += [_add_pairs(pair, (more, more)) for pair in found]
        return [number for pair in found for number in pair]

    def times_plus(self, values: Sequence[Any], factor: Any, added: Sequence[Any]) -> Iterable[Any]:
        both = zip(_pairs(values), _pairs(added), strict=True)
        found = (cute.arch.fma_packed_f32x2(p, (factor, factor), more) for p, more in both)
        return (value for pair in found for value in pair)

    def scaled(self, values: Iterable[Any], factor: Any, shift: Any) -> Iterable[Any]:
        less = -shift
        found = (cute.arch.fma_packed_f32x2(p, (factor, factor), (less, less)) for p in _pairs(list(values)))
        return (value for pair in found for value in pair)

    def times(self, values: Sequence[Any], factor: Any) -> Iterable[Any]:
        found = (cute.arch.mul_packed_f32x2(p, (factor, factor)) for p in _pairs(values))
        return (value for pair in found for value in pair)

    def total(self, first: Any, values: Sequence[Any]) -> Any:
        low, high = tree(_add_pairs, chains(_add_pairs, _pairs(values)))
        return low + high if first is None else first + (low + high)


ONE_BY_ONE, IN_PAIRS = OneByOne(), InPairs()


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _add_pairs(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return cute.arch.add_packed_f32x2(a, b)


def chains(op: Callable[[Any, Any], Any], values: Sequence[Any]) -> list[Any]:
    """`op` over every `CHAINS`-th of the values."""
    return [functools.reduce(op, values[i::CHAINS]) for i in range(min(CHAINS, len(values)))]


def tree(op: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    """`op` over all values, pairs of neighbours first."""
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


__all__ = ["IN_PAIRS", "ONE_BY_ONE", "Arithmetic", "InPairs", "OneByOne", "chains", "tree"]
