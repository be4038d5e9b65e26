"""Mods in a compiled region from its second step on: other numbers, lengths, tensors and mods, as eager code has them.

What changes from one step to the next Dynamo keeps symbolic from then on, so the second step is another reading than
the first, and the third may be another again.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn import errors
from composattn.graph.dynamo_versions import is_known
from composattn.mods import alibi, causal, document, prefix_lm, sliding_window, softcap
from tests.cpu.test_one_reading import FORMS as FIXED
from tests.cpu.test_one_reading import Module, calls

pytestmark = pytest.mark.skipif(not is_known(), reason="refused as a whole: tests/cpu/test_versions_of_torch.py")

Step = SimpleNamespace


class Window:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q * 2 - kv) % 8 < self.width


def step(number: int, draw: torch.Generator) -> Step:
    """What a step has of its own: numbers that differ, and the third one another length."""
    length = (24, 24, 31)[number]
    return Step(
        x=torch.randn(2, 4, length, 8, generator=draw),
        length=length,
        n=(3, 4, 6)[number],
        m=(11, 9, 10)[number],
        f=(0.5, 0.75, 1.25)[number],
        flag=number % 2 == 1,
        window=Window(number + 2),
        scalar=ca.scalar(number + 3),
        table=torch.randn(4, length, generator=draw),
        ids=torch.randint(0, 9, (length,), generator=draw),
        limits=torch.randint(3, 12, (2,), generator=draw),
        limit=torch.tensor(number + 4),
        rows=torch.randn(length, 3, generator=draw),
        picked=torch.randint(0, 4, (2, 3), generator=draw),
    )


MASKS: dict[str, Callable[[Step], Any]] = {
    "remainders": lambda s: lambda b, h, q, kv: ((q - kv) % s.m < s.n) & ((q - kv) % -s.n > -2),
    "quotients": lambda s: lambda b, h, q, kv: (q // s.n == kv // s.n) | (s.m // (q + 1) + s.n % (q + 1) <= kv),
    "shifts": lambda s: lambda b, h, q, kv: ((q >> s.n) >= (kv >> s.n)) & ((q << s.n) + (1 << s.n) >= kv),
    "bits": lambda s: lambda b, h, q, kv: (q ^ s.n) >= (kv & s.m) | 1,
    "powers": lambda s: lambda b, h, q, kv: (q**2 < kv * s.n**2) | (q**s.n >= (s.n * 1.0) ** (kv % 4)),
    "floats of numbers": lambda s: lambda b, h, q, kv: (q - kv <= s.m / s.n) & (q / s.n >= kv / s.m),
    "whole numbers of numbers": lambda s: lambda b, h, q, kv: (s.m + 3) * s.n + s.m % s.n > (q - kv) * (s.m - s.n * 2),
    "functions of numbers": lambda s: lambda b, h, q, kv: q // math.floor(s.n * 1.7) <= max(s.n, s.m - 4) + abs(s.n),
    "what takes no symbol": lambda s: lambda b, h, q, kv: (
        ((q & ~s.n) >= (kv & ~s.n)) & (q - kv <= divmod(s.m, s.n)[1] + math.isqrt(s.n) + len(str(s.n)))
    ),
    "tensors of numbers": lambda s: lambda b, h, q, kv: (
        (torch.arange(s.n) == (q - kv)[..., None]).any(-1) | (q - kv <= torch.tensor([s.n, s.m])[b])
    ),
    "a tensor of a number": lambda s: lambda b, h, q, kv: q - kv <= torch.full((), s.n) + torch.tensor(s.m) // 4,
    "a number of numpy's": lambda s: lambda b, h, q, kv: (q - kv).clamp(s.n, s.m) < np.int64(s.m) - 1,
    "branches": lambda s: (lambda b, h, q, kv: (q >= kv if s.n > 3 else q <= kv) | (s.n == 3) & (s.m > 9) | s.flag),
    "a number as a key and a place": lambda s: lambda b, h, q, kv: functools.reduce(
        operator.or_, [q - kv == {3: 1, 4: 2}.get(s.n, 3) * i + [1, 2][s.n % 2] for i in range(s.n)]
    ),
    "a mask or none": lambda s: None if s.flag else (lambda b, h, q, kv: q >= kv),
    "the length": lambda s: lambda b, h, q, kv: (q * 3 + s.n) % s.length >= kv,
    "a captured length": lambda s: lambda b, h, q, kv: (q - kv < s.table.shape[-1] // 2) | (s.table.shape[1] > 24),
    "ids": lambda s: lambda b, h, q, kv: s.ids[q] // s.n == s.ids[kv] // s.n,
    "limits": lambda s: lambda b, h, q, kv: (lambda lo, hi: (kv < lo) | (kv < hi) & (b > 0))(*s.limits),
    "a 0-d tensor": lambda s: lambda b, h, q, kv: (q - kv) // s.n < s.limit * s.n,
    "a row of picked blocks": lambda s: lambda b, h, q, kv: (s.picked[b] == (kv // s.n)[..., None]).any(-1),
    "a run-time number": lambda s: lambda b, h, q, kv: (q - kv) % s.m < s.scalar + s.n,
    "a partial": lambda s: functools.partial(lambda w, b, h, q, kv, v=s.m: (q - kv) % v < w, s.n),
    "an object": lambda s: lambda b, h, q, kv: s.window(b, h, q // s.n, kv // s.n),
    "ready masks": lambda s: causal() & sliding_window((s.n, s.m)) | prefix_lm(s.n) | document(s.ids) & ~causal(),
    "a function joined": lambda s: ca.mask(lambda b, h, q, kv: q - kv < s.n) & ~prefix_lm(s.limits),
}  # fmt: skip

SCORES: dict[str, Callable[[Step], Any]] = {
    "a float": lambda s: lambda x, b, h, q, kv: s.f * torch.tanh(x / s.f) + (q - kv) * (s.n * s.f) * math.log(s.f + 1),
    "a choice of floats": lambda s: lambda x, b, h, q, kv: torch.where(q >= kv, x, -s.f).masked_fill(q == kv, s.f),
    "slopes by a number": lambda s: lambda x, b, h, q, kv: x * s.n**-0.5 + 2.0 ** (-8.0 * (h + 1) / s.n) * (kv - q),
    "a flag": lambda s: lambda x, b, h, q, kv: x * 2 + s.flag * (q - kv) if s.flag else x,
    "a table": lambda s: lambda x, b, h, q, kv: x + s.table[h, ((q - kv).abs() // s.n).clamp(max=5)] * s.n,
    "a table's row by number": lambda s: lambda x, b, h, q, kv: x + s.table[s.n % 4][q] + s.table[h, -s.n],
    "rows": lambda s: lambda x, b, h, q, kv: x - (s.rows[q] - s.rows[kv]).pow(2).sum(-1) * s.f,
    "the length": lambda s: lambda x, b, h, q, kv: x * (q + 1) / s.length * s.table.shape[1] ** -0.5,
    "ready score mods": lambda s: alibi(s.table[:, 0].exp()) >> softcap(s.n),
}

CHANGING: dict[str, Any] = {f"mask: {n}": lambda s, m=m: {"mask_mod": m(s)} for n, m in MASKS.items()} | {
    f"score: {n}": lambda s, m=m: {"score_mod": m(s)} for n, m in SCORES.items()
}
CHANGING["scale"] = lambda s: {"scale": 1 / s.n}
PARTS = 4  # of all forms: a region each, short enough for the day


def attended(x: torch.Tensor, s: Step, *, names: list[str]) -> list[torch.Tensor]:
    return [ca.attention(x, x, x, **CHANGING[name](s)) for name in names]


Attend = Callable[[torch.Tensor, Step], list[torch.Tensor]]
READINGS: dict[str, Callable[[Attend], Callable[[torch.Tensor, Step], Any]]] = {
    "compiled": lambda attend: attend,
    "below a checkpoint": lambda attend: lambda x, s: checkpoint(lambda y: attend(y, s), x, use_reentrant=False),
    "in a branch": lambda attend: (
        lambda x, s: torch.cond(x.sum() < 1e9, lambda y: attend(y, s), lambda y: attend(y, s), (x,))
    ),
}


def by_day(*names: str) -> list[Any]:
    return [pytest.param(n, marks=() if n in names else (pytest.mark.nightly,)) for n in READINGS]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("reading", by_day("compiled"))
def test_each_step_of_a_region_computes_what_it_does_in_eager_code(
    reading: str, part: int, generator: torch.Generator
) -> None:
    names = [*CHANGING][part::PARTS]
    attend = functools.partial(attended, names=names)
    compiled = torch.compile(READINGS[reading](attend), fullgraph=True, backend="eager")
    for number in range(3):
        s = step(number, generator)
        if reading == "in a branch":
            s.f = 0.5  # a float that changes stops torch.cond, with no composattn in it (torch 2.13)
        for name, found, wanted in zip(names, compiled(s.x, s), attend(s.x, s), strict=True):
            torch.testing.assert_close(found, wanted, msg=f"{name}, step {number}")


@pytest.mark.nightly
@pytest.mark.parametrize("reading", READINGS)
def test_forms_of_other_lengths_in_later_steps(reading: str, generator: torch.Generator) -> None:
    run = calls(FIXED)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "compiled": run,
        "below a checkpoint": lambda x: checkpoint(run, x, use_reentrant=False),
        "in a branch": lambda x: torch.cond(x.sum() < 1e9, run, run, (x,)),
    }
    assert_lengths(torch.compile(ways[reading], fullgraph=True, backend="eager"), (12, 11, 9), generator)


@pytest.mark.nightly
@pytest.mark.parametrize("strict", [False, True])
def test_forms_exported_with_a_free_length(strict: bool, generator: torch.Generator) -> None:
    free = {"x": {2: torch.export.Dim("length", min=2, max=12)}}
    x = torch.randn(2, 4, 12, 8)
    program = torch.export.export(Module(calls(FIXED)), (x,), strict=strict, dynamic_shapes=free)
    assert_lengths(program.module(), (12, 11, 7), generator)


def assert_lengths(run: Callable[..., Any], lengths: tuple[int, ...], generator: torch.Generator) -> None:
    for length in lengths:
        x = torch.randn(2, 4, length, 8, generator=generator)
        for name, found, wanted in zip(FIXED, run(x), calls(FIXED)(x), strict=True):
            torch.testing.assert_close(found, wanted, msg=f"{name}, length {length}")


# --- numpy's arrays ---------------------------------------------------------------------------------------------------

ARRAY, GRID, POINT = np.array([2, 5, 3]), np.array([[1, 9], [2, 8]]), np.array(4)
TABLE = torch.linspace(-1, 1, 6)

OF_ARRAYS: dict[str, Callable[..., Any]] = {
    "an element": lambda x, b, h, q, kv: torch.where(q - kv < ARRAY[1], x, -1.0),
    "an element on the left": lambda x, b, h, q, kv: torch.where(ARRAY[-1] > q - kv, x, -1.0),
    "of a slice": lambda x, b, h, q, kv: x + ARRAY[1:][0],
    "of two dimensions": lambda x, b, h, q, kv: x + GRID[1, 0] * GRID[0][1],
    "of its transpose": lambda x, b, h, q, kv: x + GRID.T[0][1] * 2,
    "one of numbers made there": lambda x, b, h, q, kv: x + np.array([2, 3], np.int32)[1],
    "arithmetic": lambda x, b, h, q, kv: x * (-POINT) + abs(ARRAY[1]),
    "a loop": lambda x, b, h, q, kv: sum([a * i for i, a in enumerate(ARRAY)], x),
    "the largest": lambda x, b, h, q, kv: x * max(ARRAY) + ARRAY.sum(),
    "its length": lambda x, b, h, q, kv: x * len(ARRAY) + GRID.shape[1],
    "equality": lambda x, b, h, q, kv: torch.where(q - kv == ARRAY[2], x, 0.0),
    "a place in a table": lambda x, b, h, q, kv: x + TABLE[ARRAY[1]],
    "a tensor made of it": lambda x, b, h, q, kv: x + torch.tensor(ARRAY)[h % 3],
    "limits of clamp": lambda x, b, h, q, kv: x + torch.clamp(q - kv, ARRAY[0], ARRAY[1]),
    "a choice": lambda x, b, h, q, kv: torch.where(q >= kv, x, ARRAY[1]),
}
NOT_THERE: dict[str, Callable[..., Any]] = {
    "a Python number": lambda x, b, h, q, kv: x * int(ARRAY[1]),
    "a branch": lambda x, b, h, q, kv: x if ARRAY[1] > 3 else -x,
    "membership": lambda x, b, h, q, kv: x if 5 in ARRAY else -x,
    "a comparison of all": lambda x, b, h, q, kv: x if (ARRAY > 9).any() else -x,
    "a list": lambda x, b, h, q, kv: x * ARRAY.tolist()[1],
    "arithmetic of all": lambda x, b, h, q, kv: x + (np.arange(3) + 2)[1],
}


def test_arrays_in_a_region_hold_what_they_hold_in_eager_code(generator: torch.Generator) -> None:
    x = torch.randn(2, 4, 12, 8, generator=generator)
    run = lambda x: [ca.attention(x, x, x, score_mod=mod) for mod in OF_ARRAYS.values()]  # noqa: E731
    for name, found, wanted in zip(
        OF_ARRAYS, torch.compile(run, fullgraph=True, backend="eager")(x), run(x), strict=True
    ):
        torch.testing.assert_close(found, wanted, msg=name)


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_only_the_run_can_read_of_an_array_is_refused_by_name(name: str, generator: torch.Generator) -> None:
    x = torch.randn(2, 4, 12, 8, generator=generator)
    with pytest.raises(errors.ComposattnError):
        torch.compile(lambda x: ca.attention(x, x, x, score_mod=NOT_THERE[name]), fullgraph=True, backend="eager")(x)
