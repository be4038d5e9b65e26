"""Attributes of a user's own on tensors, functions and objects: whatever way a mod comes to them, a change is seen."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.graph.fingerprint import fingerprint
from composattn.mods import causal

LENGTH = 5
W: Any = torch.linspace(-1, 1, 2 * LENGTH, dtype=torch.float64).view(2, LENGTH)
V: Any = W + 1
TABLES = (W,)
HELD = SimpleNamespace(table=W, tables=[W], by_name={"w": W})
FACTOR: Any = ca.scalar(1.0)
HIDDEN: Any = causal()


def helper() -> Any:
    return W


def other() -> Any:
    return V


class Marked:
    """What a method is bound to; its class has the attributes too."""

    table = W

    def method(self) -> Any:
        return 1

    @property
    def behind(self) -> Any:
        return self.table

    def through_a_name(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        me = self
        return s * me.method.__self__.gain  # type: ignore[attr-defined]

    def through_others(*args: Any) -> Any:  # as decorators write it
        return args[1] * args[0].gain


MARKED: Any = Marked()
HELPER: Any = helper
PARTIAL: Any = functools.partial(helper)
PATH = functools.partial(lambda s, b, h, i, j, t: s * t.gain, t=W)


def in_a_loop(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    for t in TABLES:
        s = s * t.gain
    return s


def of_an_inner_argument(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    def scaled(s: Any, t: Any) -> Any:
        return s * t.gain

    return scaled(s, W)


def of_an_inner_closure(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    t = W

    def scaled(s: Any) -> Any:
        return s * t.gain

    return scaled(s)


def in_a_match(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    match W:
        case t:
            return s * t.gain


def of_a_class_pattern(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    match W:
        case torch.Tensor(gain=gain):
            return s * gain


def in_a_handler(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    try:
        raise StopIteration(W)
    except StopIteration as found:
        return s * found.value.gain


def where_it_may_be_missing(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    t = W
    try:
        return s * t.gain
    except AttributeError:
        return s


def of_unpacked(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    (t,) = TABLES
    return s * t.gain


def of_one_of_two(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * (helper or other).gain  # type: ignore[attr-defined, truthy-function]


def of_a_partials_function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * PARTIAL.func.gain


def hidden_as_a_method(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    t = W
    return s * t.mean


def directly_as_a_method(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * W.size


def of_a_functions_name(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    f = helper
    return s * f.mean  # type: ignore[attr-defined]


def in_text(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * float("{.gain}".format(HELPER))  # noqa: UP032


def in_formatted_text(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * float(f"{helper.gain}")  # type: ignore[attr-defined]


FORMS: dict[str, Callable[..., Any]] = {
    "itself": lambda s, b, h, i, j: s * W.gain,
    "an index": lambda s, b, h, i, j: s * TABLES[0].gain,
    "a default": lambda s, b, h, i, j, t=W: s * t.gain,
    "a result": lambda s, b, h, i, j: s * helper().gain,
    "a walrus": lambda s, b, h, i, j: s * (t := W).gain + 0 * t[h, j],
    "a comprehension": lambda s, b, h, i, j: s * sum([t.gain for t in TABLES]),
    "a choice": lambda s, b, h, i, j: s * (W if TABLES else V).gain,
    "an or": lambda s, b, h, i, j: s * ((TABLES and W).gain),
    "getattr": lambda s, b, h, i, j: s * getattr(W, "gain"),  # noqa: B009
    "vars": lambda s, b, h, i, j: s * vars(W)["gain"],
    "__dict__": lambda s, b, h, i, j: s * W.__dict__["gain"],
    "__dict__ of a function": lambda s, b, h, i, j: s * helper.__dict__["gain"],
    "a function": lambda s, b, h, i, j: s * helper.gain,  # type: ignore[attr-defined]
    "an attribute of an attribute": lambda s, b, h, i, j: s * HELD.table.gain,
    "a property": lambda s, b, h, i, j: s * MARKED.behind.gain,
    "a list": lambda s, b, h, i, j: s * HELD.tables[0].gain,
    "a dict": lambda s, b, h, i, j: s * HELD.by_name["w"].gain,
    "a class": lambda s, b, h, i, j: s * Marked.gain,  # type: ignore[attr-defined]
    "a class by its object": lambda s, b, h, i, j: s * MARKED.__class__.gain,
    "an owner": lambda s, b, h, i, j: s * MARKED.method.__self__.gain,
    "a partial": lambda s, b, h, i, j: s * PARTIAL.gain,
    "a run-time number": lambda s, b, h, i, j: s * (FACTOR, 1)[0].gain,
    "a part of a part": lambda s, b, h, i, j: s * HELD.gain,
    "a partial's argument": PATH,
    "a bound method": MARKED.through_a_name,
    "a method of any arguments": MARKED.through_others,
    **{
        fn.__name__: fn
        for fn in (
            in_a_loop, of_an_inner_argument, of_an_inner_closure, in_a_match, of_a_class_pattern, in_a_handler,
            where_it_may_be_missing, of_unpacked, of_one_of_two, of_a_partials_function, hidden_as_a_method,
            directly_as_a_method, of_a_functions_name, in_text, in_formatted_text,
        )
    },
}  # fmt: skip
_MARKED = (W, V, helper, other, PARTIAL, MARKED, Marked, HELD, FACTOR)


@pytest.mark.parametrize("name", FORMS)
def test_an_attribute_of_the_users_own_is_seen_whatever_way_a_mod_comes_to_it(
    name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    for gain in (2.0, 3.0, 0.5, 2.0):
        for of in _MARKED:
            monkeypatch.setattr(of, "gain", gain, raising=False)
        for of in (W, helper):
            monkeypatch.setattr(of, "mean", gain, raising=False)
        if name == "directly_as_a_method":
            monkeypatch.setattr(W, "size", gain)
        found = ca.attention(q, k, v, score_mod=FORMS[name])
        torch.testing.assert_close(found, (q @ k.mT / 2 * gain).softmax(-1) @ v)


ROW: Any = torch.ones(2, dtype=torch.float64)


def of_a_method(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    t = ROW
    return s * t.sum(-1)


@pytest.mark.parametrize(
    ("mod", "of", "name", "value"),
    [(where_it_may_be_missing, W, "gain", 3.0), (of_a_method, ROW, "sum", lambda dim: 3.0)],
    ids=["where it may be missing", "in place of a method"],
)
def test_an_attribute_that_comes_later_is_seen(
    mod: Any, of: Any, name: str, value: Any, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    before = ca.attention(q, k, v, score_mod=mod)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, value, raising=False)
        torch.testing.assert_close(ca.attention(q, k, v, score_mod=mod), (q @ k.mT / 2 * 3).softmax(-1) @ v)
    torch.testing.assert_close(ca.attention(q, k, v, score_mod=mod), before, rtol=0, atol=0)


def test_one_function_asked_for_twice_is_told_apart_from_two_that_say_the_same() -> None:
    def factor(by: float) -> Callable[..., Any]:
        return lambda s: s * by

    first, second, chosen = factor(2.0), factor(2.0), factor(2.0)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return chosen(s) if chosen is first else second(s) + 1

    marks = []
    for chosen in (first, second, first):  # noqa: B007  the mod reads it
        marks.append(fingerprint(mod, 5))
    assert None not in marks
    assert marks[0][0] == marks[2][0] != marks[1][0]  # type: ignore[index]


def test_what_a_mod_writes_to_outside_leaves_no_fingerprint() -> None:
    count = 0

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal count
        count += 1
        return s

    assert fingerprint(mod, 5) is None


class Mode(str, enum.Enum):
    NEAR, FAR = "near", "far"


MODE = Mode.NEAR


def clipped(x: Any) -> Any:
    return x.clamp(-3.0, 3.0)


def of_terms(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    terms = []
    for t in (W, V):
        terms.append(t[h, j])
    return s + sum(terms)


COMMON: dict[str, Callable[..., Any]] = {
    "a table": lambda s, b, h, i, j: s + W[h, j],
    "a distance": lambda s, b, h, i, j: s - (i - j).abs() * 0.5,
    "a cast": lambda s, b, h, i, j: s + W[h, j].float() * j.to(s.dtype),
    "a method of a tensor": lambda s, b, h, i, j: s + W.abs()[h, j],
    "a length": lambda s, b, h, i, j: s + W[h, j.clamp(max=W.shape[1] - 1)] / W.size(0),
    "torch's functions": lambda s, b, h, i, j: torch.where(i >= j, s.tanh(), s).clamp(min=-9.0),
    "a helper": lambda s, b, h, i, j: clipped(clipped(s) + W[h, j]),
    "a member of an enum": lambda s, b, h, i, j: s * 2 if MODE is Mode.NEAR else s,
    "a ready mask": lambda s, b, h, i, j: torch.where(HIDDEN(b, h, i, j), s, s.neg()),
    "terms in a list": of_terms,
}


@pytest.mark.parametrize("name", COMMON)
def test_mods_as_most_write_them_are_known_without_tracing(name: str) -> None:
    first, second = (fingerprint(COMMON[name], 5) for _ in range(2))
    assert first is not None and first == second
