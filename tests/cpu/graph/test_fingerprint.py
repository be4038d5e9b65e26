"""What a mod reaches is read by a function written for it: whatever changes gives another fingerprint, or none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from composattn.graph.fingerprint import fingerprint
from composattn.mods import causal, softcap

HERE = 3


class Holder:
    """What a method reads by name."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def mod(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < self.value


def over(value: Any) -> Callable[..., Any]:
    return lambda b, h, q, kv: q - kv < value


def by_attribute(value: Any) -> Callable[..., Any]:
    holder = Holder(value)
    return lambda b, h, q, kv: q - kv < holder.value


def by_default(value: Any) -> Callable[..., Any]:
    return lambda b, h, q, kv, n=value: q - kv < n


def by_name(value: Any) -> Callable[..., Any]:
    def mod(b: Any, h: Any, q: Any, kv: Any, *, n: Any = value) -> Any:
        return q - kv < n

    return mod


def by_a_helper(value: Any) -> Callable[..., Any]:
    inner = over(value)
    return lambda b, h, q, kv: inner(b, h, q, kv)


def given(value: Any) -> Callable[..., Any]:
    return functools.partial(lambda b, h, q, kv, n: q - kv < n, n=value)


WAYS = [over, by_attribute, by_default, by_name, by_a_helper, given, lambda value: Holder(value).mod]
TABLE = torch.arange(8)
VALUES = [
    1, 2, True, 1.0, 0.0, -0.0, None, "a", b"a", (1, 2), (1, 2.0), (1,), torch.float32, torch.device("cpu"),
    TABLE, TABLE[:4], TABLE[::2], TABLE.int(), TABLE.float(), torch.nn.Parameter(TABLE.float()),
    torch.tanh, torch.exp, math.sin, abs, min, causal(), softcap(2.0), softcap(3.0), over(1), over(2),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("<>"))
def test_all_kinds_of_values_are_told_apart_wherever_they_are_reached(way: Callable[[Any], Any]) -> None:
    first = [fingerprint(way(value)) for value in VALUES]
    again = [fingerprint(way(value)) for value in reversed(VALUES)][::-1]
    keys = [mark[0] for mark in first if mark is not None]
    assert len(keys) == len(set(keys)) == len(VALUES)
    assert [mark and mark[1] for mark in first] == [mark and mark[1] for mark in again]
    few = VALUES[:4]  # more kinds than a code's readers may begin anew
    assert [fingerprint(way(v)) == fingerprint(way(v)) for v in few] == [True] * len(few)


def test_one_tensor_read_twice_is_told_apart_from_two_of_its_form() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q, kv: x[q] == y[kv]

    one, other = torch.arange(8), torch.arange(8)
    twice, two, again = (fingerprint(both(one, y)) for y in (one, other, one))
    assert twice is not None and two is not None and again is not None
    assert twice[0] == again[0] != two[0]
    assert [id(t) for t in two[1]] == [id(one), id(other)] and [id(t) for t in again[1]] == [id(one)]


def test_a_name_that_hides_a_builtin_is_seen() -> None:
    code = "lambda b, h, q, kv: abs(q - kv) < 3"
    plain: dict[str, Any] = {}
    mod = eval(code, plain)
    before = fingerprint(mod)
    plain["abs"] = torch.tanh
    hidden = fingerprint(mod)
    del plain["abs"]
    assert before is not None and hidden is not None
    assert before[0] != hidden[0] and fingerprint(mod) == before


def test_a_global_and_a_cell_that_are_gone_leave_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = lambda b, h, q, kv: q - kv < HERE  # noqa: E731
    assert fingerprint(mod) is not None
    monkeypatch.delitem(globals(), "HERE")
    assert fingerprint(mod) is None

    width = 3
    inner = lambda b, h, q, kv: q - kv < width  # noqa: E731, F821
    assert fingerprint(inner) is not None
    del width
    assert fingerprint(inner) is None


def test_a_helper_with_other_code_is_seen() -> None:
    def helper(q: Any) -> Any:
        return q + 1

    def other(q: Any) -> Any:
        return q + 2

    mod = lambda b, h, q, kv: helper(q) < kv  # noqa: E731
    before = fingerprint(mod)
    helper.__code__ = other.__code__
    after = fingerprint(mod)
    assert before is not None and after is not None and before[0] != after[0]


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, Holder(1), object(), torch.tensor([1.0]).sum, print],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_unseen_has_no_fingerprint(value: Any) -> None:
    assert fingerprint(over(value)) is None


def test_no_reader_keeps_a_tensor_alive() -> None:
    import weakref

    table = torch.arange(4)
    assert fingerprint(over(table)) is not None
    gone = weakref.ref(table)
    del table
    assert gone() is None
