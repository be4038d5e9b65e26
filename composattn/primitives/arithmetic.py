"""Products and sums of a thread's fp32 elements: one by one, or two per instruction on GPUs that can do that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import math as cm

from .values import Fixed

CHAINS = 4  # independent partial maxima and sums, so that latency overlaps


class Arithmetic(Fixed):
    """How elements are multiplied and added, `together` of them where each has numbers of its own: here one by one.

    The order of sums is its own.
    """

    together = 1

    def scaled(self, values: Iterable[Any], factor: Any, shift: Any) -> Iterable[Any]:
        """Each times `factor`, less `shift`, rounded once: so GPUs compute it, and the emulator if it is told."""
        less = -shift
        return (cm.fma(value, factor, less) for value in values)

    def times(self, values: Sequence[Any], factor: Any) -> Iterable[Any]:
        """Each times `factor`."""
        return (value * factor for value in values)

    def multiples(self, step: Any, count: int) -> Sequence[Any]:
        """`step` times 0, 1, 2, ...; `count` of them, a power of two."""
        return [step * float(i) for i in range(count)]

    def times_plus(self, values: Sequence[Any], factor: Any, added: Sequence[Any]) -> Iterable[Any]:
        """Each times `factor`, plus its own of `added`."""
        return (cm.fma(value, factor, more) for value, more in zip(values, added, strict=True))

    def total(self, first: Any, values: Sequence[Any]) -> Any:
        """The sum of all, and of `first` unless that is None."""
        return tree(add, chains(add, values if first is None else [first, *values]))

    def products(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Each times its own of `others`."""
        return [x * y for x, y in zip(values, others, strict=True)]

    def sums(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Each plus its own of `others`."""
        return [x + y for x, y in zip(values, others, strict=True)]

    def differences(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Each less its own of `others`."""
        return [x - y for x, y in zip(values, others, strict=True)]

    def plus(self, values: Sequence[Any], number: float, down: bool = False) -> list[Any]:
        """Each plus `number`, rounded to the nearest, or down."""
        return [_add_down(x, Float32(number)) if down else x + number for x in values]

    def polynomial(self, coefficients: Sequence[float], values: Sequence[Any]) -> list[Any]:
        """c0 + c1 x + c2 x² + ... of each."""
        *lower, last = coefficients
        totals: list[Any] = [Float32(last)] * len(values)
        for coefficient in lower[::-1]:
            totals = [cm.fma(total, x, Float32(coefficient)) for total, x in zip(totals, values, strict=True)]
        return totals


class InOrder(Arithmetic):
    """Arithmetic whose sums begin with 0, so that a tile rounds alike wherever it comes in a row."""

    def total(self, first: Any, values: Sequence[Any]) -> Any:
        # what nothing was summed before must be added as what was hidden before is
        return super().total(Float32(0.0) if first is None else first, values)


class InPairs(Arithmetic):
    """Neighbours are a pair; they are even in number."""

    together = 8  # of 16 ALiBi spilled 4

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

    def products(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return _each(cute.arch.mul_packed_f32x2, _pairs(values), _pairs(others))

    def sums(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return _each(cute.arch.add_packed_f32x2, _pairs(values), _pairs(others))

    def differences(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        return _each(cute.arch.sub_packed_f32x2, _pairs(values), _pairs(others))

    def plus(self, values: Sequence[Any], number: float, down: bool = False) -> list[Any]:
        added = functools.partial(cute.arch.add_packed_f32x2, rnd="rm" if down else "rn")
        return _each(added, _pairs(values), _same(number, values))

    def polynomial(self, coefficients: Sequence[float], values: Sequence[Any]) -> list[Any]:
        *lower, last = coefficients
        pairs, totals = _pairs(values), _same(last, values)
        for coefficient in lower[::-1]:
            added = _same(coefficient, values)
            totals = [cute.arch.fma_packed_f32x2(*three) for three in zip(totals, pairs, added, strict=True)]
        return [value for pair in totals for value in pair]


ONE_BY_ONE, IN_ORDER, IN_PAIRS = Arithmetic(), InOrder(), InPairs()


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _same(number: float, values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs of `number`, one for each pair of `values`."""
    return [(Float32(number), Float32(number))] * (len(values) // 2)


def _each(op: Callable[[Any, Any], Any], pairs: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`op` of each pair and its other one, as numbers."""
    return [value for both in zip(pairs, others, strict=True) for value in op(*both)]


def _add_down(x: Any, y: Any) -> Any:
    return cute.arch.inline_ptx(
        "add.rm.ftz.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


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
