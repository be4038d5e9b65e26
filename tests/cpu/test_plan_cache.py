"""ca.attention traces and plans once per form: what changed is seen, and nothing is kept alive."""

from __future__ import annotations

import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import composattn as ca
from composattn.dispatch import plan_cache, planned
from composattn.graph import borrowed
from composattn.graph.counters import Counter
from composattn.graph.fingerprint import fingerprint
from composattn.mods import alibi, causal, document, global_tokens, mod, padding, relative_bias, sliding_window, softcap
from composattn.mods.score import Score

LENGTH = 48


@pytest.fixture
def inputs(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(2, 2, LENGTH, 8, generator=generator) for _ in range(3)]


class Work:
    """How often something was traced, and how often planned."""

    def __init__(self) -> None:
        self.traced = self.planned = 0

    def of(self, call: Callable[[], Any]) -> tuple[int, int]:
        """(traces, plans) of one call."""
        before = self.traced, self.planned
        call()
        return self.traced - before[0], self.planned - before[1]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    counted = Work()
    form_of, plan = mod.form_of, planned.Planned._plan  # type: ignore[attr-defined]

    def count_form(*args: Any) -> Any:
        counted.traced += 1
        return form_of(*args)

    def count_plan(*args: Any) -> Any:
        counted.planned += 1
        return plan(*args)

    monkeypatch.setattr(mod, "form_of", count_form)
    monkeypatch.setattr(planned.Planned, "_plan", count_plan)
    yield counted


SLOPES, IDS = torch.tensor([0.25, 0.5]), torch.arange(LENGTH) // 7
BIAS = torch.linspace(-1, 1, 2 * LENGTH).view(2, LENGTH)
WIDTH = 9
KEPT_SCORE = alibi(SLOPES)


def borrowed_for(tensor: torch.Tensor) -> borrowed.BorrowedCapture:
    """The capture that stands for a tensor."""
    found = borrowed.borrow([tensor])
    assert found is not None
    return found.captures[0]


def _read_twice(of: torch.Tensor) -> Callable[..., Any]:
    """A mod that reads a tensor itself, after a mask that does."""
    mask = document(of)
    return lambda b, h, q, kv: mask(b, h, q, kv) & (of.shape[0] > 40)


def _outer(scale: float) -> Callable[..., Any]:
    def squash(x: Any) -> Any:
        return torch.tanh(x / scale) * scale

    return lambda s, b, h, q, kv: squash(s) + BIAS[h, q]


ENTRIES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a ready mask": lambda: {"mask_mod": causal()},
    "a ready mask of a number": lambda: {"mask_mod": sliding_window((5, 0))},
    "a ready mask of a tensor, made at each call": lambda: {"mask_mod": causal() & document(IDS)},
    "a ready score mod, made at each call": lambda: {"score_mod": alibi(SLOPES)},
    "a ready score mod, kept": lambda: {"score_mod": KEPT_SCORE, "mask_mod": causal()},
    "joined score mods": lambda: {"score_mod": alibi(SLOPES) >> softcap(5.0)},
    "a relative bias": lambda: {"score_mod": relative_bias(BIAS[:, 1:])},
    "a lambda": lambda: {"mask_mod": lambda b, h, q, kv: q >= kv},
    "a lambda over a tensor": lambda: {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, (q - kv) % 9]},
    "a lambda over a global number": lambda: {"mask_mod": lambda b, h, q, kv: abs(q - kv) < WIDTH},
    "functions that call functions": lambda: {"score_mod": _outer(3.0)},
    "a partial": lambda: {"mask_mod": partial(lambda b, h, q, kv, n: q - kv < n, n=4)},
    "a lambda that calls a mask": lambda: {"mask_mod": lambda b, h, q, kv: causal()(b, h, q, kv) | (IDS[kv] == 0)},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_where_nothing_is_new_nothing_is_traced_or_planned(name: str, inputs: list[torch.Tensor], work: Work) -> None:
    def call() -> torch.Tensor:
        return ca.attention(*inputs, **ENTRIES[name]())

    first = call()
    if name == "a lambda that calls a mask":  # causal() is found by its global name, called and made anew
        assert work.of(call)[1] == 0
    else:
        assert work.of(call) == (0, 0)
    torch.testing.assert_close(call(), first, rtol=0, atol=0)
    torch.testing.assert_close(first, ca.attention(*inputs, **ENTRIES[name](), backend="reference"))


def test_a_tensor_that_a_mask_read_before_is_told_apart_by_its_form() -> None:
    marks = [fingerprint(_read_twice(torch.zeros(n, dtype=torch.int64))) for n in (LENGTH, 30)]
    keys = [mark[0] for mark in marks if mark is not None]
    assert len(set(keys)) == 2


@pytest.mark.parametrize("entry", ["a function", "a block mask"])
def test_a_tensor_whose_form_changes_in_place_is_read_as_it_is_now(entry: str, generator: torch.Generator) -> None:
    inputs = [torch.randn(1, 3, 3, 8, generator=generator) for _ in range(3)]
    table = torch.tensor([[True, True, False], [False, True, True], [False, False, True]])

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return table[q, kv]

    blocks = create_block_mask(visible, None, None, 3, 3, device="cpu", BLOCK_SIZE=16)  # one, in which all is asked for
    for step in range(6):
        if step % 2:
            table.t_()
        for _ in range(2):
            if entry == "a function":
                out = ca.attention(*inputs, mask_mod=visible)
            else:
                out = ca.flex_attention(*inputs, block_mask=blocks)
            want = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=table)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_flex_attention_plans_once_per_block_mask(inputs: list[torch.Tensor], work: Work) -> None:
    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return IDS[q] == IDS[kv]

    blocks = create_block_mask(visible, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def call() -> Any:
        return ca.flex_attention(*inputs, score_mod=lambda s, b, h, i, j: s + SLOPES[h], block_mask=blocks)

    call()
    assert work.of(call) == (0, 0)


def test_the_backward_plans_nothing_new(inputs: list[torch.Tensor], work: Work) -> None:
    slopes = SLOPES.clone().requires_grad_()
    q, k, v = (t.requires_grad_() for t in inputs)

    def step() -> None:
        ca.attention(q, k, v, score_mod=alibi(slopes), mask_mod=document(IDS)).sum().backward()

    step()
    assert work.of(step) == (0, 0)


# --- what changed is seen ------------------------------------------------------------------------------------------


class Config:
    """What a mod reads by name."""

    def __init__(self) -> None:
        self.width, self.table, self.shift = 5, torch.arange(LENGTH) % 3, [1, 2]

    def near(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return abs(q - kv) < self.width

    def helped(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.near(b, h, q, kv) & (self.table[q] == self.table[kv])

    def shifted(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < self.shift[0]


CHANGES: dict[str, tuple[Callable[[Config], Any], Callable[[Config], Any]]] = {
    "an attribute": (lambda c: c.near, lambda c: setattr(c, "width", 9)),
    "an attribute behind a method": (lambda c: c.helped, lambda c: setattr(c, "width", 9)),
    "a tensor put in the place of another": (
        lambda c: c.helped,
        lambda c: setattr(c, "table", torch.arange(LENGTH) % 5),
    ),
    "what a tensor holds": (lambda c: c.helped, lambda c: c.table.add_(torch.arange(LENGTH) // 9)),
    "a tensor's memory": (lambda c: c.helped, lambda c: setattr(c.table, "data", torch.arange(LENGTH) % 7)),
    "a tensor's type": (lambda c: c.helped, lambda c: setattr(c.table, "data", (torch.arange(LENGTH) % 7).int())),
    "a swapped tensor": (
        lambda c: c.helped,
        lambda c: torch.utils.swap_tensors(c.table, torch.arange(LENGTH) % 7),
    ),
    "what a list holds": (lambda c: c.shifted, lambda c: c.shift.__setitem__(0, -4)),
    "a list": (lambda c: c.shifted, lambda c: setattr(c, "shift", [7])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_the_next_call(name: str, inputs: list[torch.Tensor]) -> None:
    made, change = CHANGES[name]
    config = Config()
    for _ in range(2):
        before = ca.attention(*inputs, mask_mod=made(config))
    change(config)
    after = ca.attention(*inputs, mask_mod=made(config))
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, ca.Attention(mask_mod=made(config), backend="reference")(*inputs))


def test_closure_cells_defaults_and_globals_are_seen(
    inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 3

    def mine(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < width + WIDTH

    def check(wanted: int) -> None:
        assert torch.equal(
            ca.attention(*inputs, mask_mod=mine), ca.attention(*inputs, mask_mod=lambda b, h, q, kv: q - kv < wanted)
        )

    check(12)
    width = 5
    check(14)
    monkeypatch.setitem(globals(), "WIDTH", -10)
    check(-5)
    for n in (2, -3):
        torch.testing.assert_close(
            ca.attention(*inputs, mask_mod=lambda b, h, q, kv, n=n: q - kv < n),
            ca.attention(*inputs, mask_mod=sliding_window((n - 1 if n > 0 else None, None)))
            if n > 0
            else ca.attention(*inputs, mask_mod=lambda b, h, q, kv: kv - q > 3),
        )


def test_numbers_that_are_equal_but_not_the_same_are_told_apart(inputs: list[torch.Tensor]) -> None:
    outs = [ca.attention(*inputs, score_mod=lambda s, b, h, q, kv, n=n: s + q // n) for n in (2, 2.0)]
    torch.testing.assert_close(outs[0], outs[1])
    with pytest.raises(ca.errors.InvalidScale):
        ca.attention(*inputs, scale=1)
        ca.attention(*inputs, scale=True)


def by_torch(inputs: list[torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=bias)


def test_an_attribute_of_the_users_own_on_a_tensor_is_seen_when_it_changes(inputs: list[torch.Tensor]) -> None:
    ids: Any = torch.zeros(LENGTH, dtype=torch.int32)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for window in (5, 20, 5):
        ids.window = window
        out = ca.attention(*inputs, mask_mod=lambda b, h, q, kv: (q - kv < ids.window) & (ids[q] == ids[kv]))
        torch.testing.assert_close(out, by_torch(inputs, distance < window))


def test_a_length_is_told_apart_from_the_place_of_a_tensor(inputs: list[torch.Tensor]) -> None:
    table = torch.linspace(-1, 1, LENGTH)

    def scaled(read: torch.Tensor, other: Any) -> Any:
        return lambda s, b, h, q, kv: s + read[kv] * (1.0 + len(other))

    for other in (table, (), (1.0,), table):
        out = ca.attention(*inputs, score_mod=scaled(table, other))
        torch.testing.assert_close(out, by_torch(inputs, (table * (1.0 + len(other))).expand(LENGTH, -1)))


def test_a_scalar_is_read_at_each_call(inputs: list[torch.Tensor], work: Work) -> None:
    cap = ca.scalar(2.0)

    def call() -> torch.Tensor:
        return ca.attention(*inputs, score_mod=softcap(cap))

    call()
    cap.value = 0.5
    assert work.of(call) == (0, 0)
    torch.testing.assert_close(call(), ca.attention(*inputs, score_mod=softcap(0.5)))


def test_a_function_that_could_do_anything_is_traced_at_each_call(inputs: list[torch.Tensor], work: Work) -> None:
    state = {"width": 3}

    def call() -> torch.Tensor:
        return ca.attention(*inputs, mask_mod=lambda b, h, q, kv: q - kv < state["width"])

    call()
    assert work.of(call) == (1, 0)  # the plan is found again by the form
    state["width"] = -2
    torch.testing.assert_close(call(), ca.attention(*inputs, mask_mod=lambda b, h, q, kv: q - kv < -2))


# --- nothing is kept alive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ready", "lambda", "trained"])
def test_nothing_that_is_kept_keeps_a_tensor_alive(kind: str, inputs: list[torch.Tensor]) -> None:
    q, k, v = (t.requires_grad_(kind == "trained") for t in inputs)
    gc.collect()
    before = len(borrowed._known), len(borrowed._watched), len(borrowed._of_tensor)

    def step() -> weakref.ref[torch.Tensor]:
        table = (torch.arange(LENGTH) // 5).clone()
        mask = document(table) if kind == "ready" else (lambda b, h, q, kv: table[q] == table[kv])
        out = ca.attention(q, k, v, mask_mod=mask)
        if kind == "trained":
            out.sum().backward()
        return weakref.ref(table)

    assert step()() is None  # at once: no cycle holds it
    assert (len(borrowed._known), len(borrowed._watched), len(borrowed._of_tensor)) == before


def test_a_new_tensor_of_the_same_form_takes_over_the_plan(inputs: list[torch.Tensor], work: Work) -> None:
    bias = BIAS.clone()

    def step(seed: int) -> None:
        ids = torch.randint(0, 3, (LENGTH,), generator=torch.Generator().manual_seed(seed))
        mods = {"mask_mod": causal() & document(ids), "score_mod": lambda s, b, h, q, kv: s + bias[h, kv]}
        found = ca.attention(*inputs, **mods)
        torch.testing.assert_close(found, ca.Attention(**mods, backend="reference")(*inputs))

    step(0)
    counted = work.of(lambda: step(1))
    assert counted == (0, 1)  # the reference's own


def test_the_plan_of_the_last_call_is_taken_over_where_other_memory_ended_too(
    inputs: list[torch.Tensor], work: Work
) -> None:
    def ids(seed: int) -> torch.Tensor:
        return torch.randint(0, 3, (LENGTH,), generator=torch.Generator().manual_seed(seed))

    both_alive = ids(0), ids(1)
    for table in both_alive:
        ca.attention(*inputs, mask_mod=document(table))
    del table, both_alive

    def step(seed: int) -> None:
        ca.attention(*inputs, mask_mod=causal() & document(ids(seed)))

    step(2)
    assert work.of(lambda: step(3)) == (0, 0)


def test_masks_that_read_tensors_of_one_form_in_turns_are_not_planned_again(
    inputs: list[torch.Tensor], work: Work
) -> None:
    def both(begin: torch.Tensor, ids: torch.Tensor, others: torch.Tensor, end: torch.Tensor, own: torch.Tensor) -> Any:
        ca.attention(*inputs, mask_mod=lambda b, h, q, kv: (kv >= begin[q]) & (ids[q] == others[kv]))
        ca.attention(*inputs, mask_mod=lambda b, h, q, kv: (kv < end[q]) | (kv == own[q]))

    def step(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        tables = [torch.randint(0, LENGTH, (LENGTH,), generator=draw) for _ in range(5)]
        both(*tables)
        while tables:  # they end in any order
            tables.pop(random.randrange(len(tables)))

    step(0)
    for seed in range(1, 4):
        assert work.of(functools.partial(step, seed)) == (0, 0)


def test_a_plan_that_was_taken_over_checks_what_its_mods_read(inputs: list[torch.Tensor]) -> None:
    short = torch.zeros(LENGTH // 2)

    def call(visible: int) -> torch.Tensor:
        keys = torch.full((2,), visible)
        return ca.attention(*inputs, mask_mod=padding(keys), score_mod=lambda s, b, h, q, kv: s + short[kv])

    call(LENGTH // 2)  # the mask hides what the table does not have
    with pytest.raises(ca.errors.CapturedIndexOutOfRange):
        call(LENGTH)


@pytest.mark.parametrize("how", ["a function", "a mask", "kept", "compiled", "compiled and kept"])
@pytest.mark.parametrize("number", [torch.tensor(0), ca.scalar(0)], ids=["a tensor", "a number"])
def test_a_table_that_a_mask_hides_no_more_is_refused_whoever_wrote(
    how: str, number: Any, inputs: list[torch.Tensor]
) -> None:
    short = torch.arange(LENGTH // 2)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q < number) & (short[q] >= kv)

    def write(visible: int) -> None:
        if isinstance(number, torch.Tensor):
            number.fill_(visible)
        else:
            number.value = visible

    write(LENGTH // 2)
    kept, made, compiled = ca.Attention(mask_mod=mask), ca.mask(mask), partial(torch.compile, fullgraph=True)
    call: Callable[[], torch.Tensor] = {
        "a function": lambda: ca.attention(*inputs, mask_mod=mask),
        "a mask": lambda: ca.attention(*inputs, mask_mod=made),
        "kept": lambda: kept(*inputs),
        "compiled": compiled(lambda: ca.attention(*inputs, mask_mod=mask), backend="eager"),
        "compiled and kept": compiled(lambda: kept(*inputs), backend="eager"),
    }[how]
    for _ in range(2):
        write(LENGTH // 2)
        torch.testing.assert_close(call(), ca.attention(*inputs, mask_mod=made, backend="reference"))
        write(LENGTH)
        with pytest.raises(ca.errors.CapturedIndexOutOfRange):
            call()


def test_tensors_that_come_and_go_are_told_apart(inputs: list[torch.Tensor]) -> None:
    """Two alive, one gone, one new of its form, and the first again."""
    for first, second in ((3, 5), (7, 11), (2, 9)):
        ids, other = torch.arange(LENGTH) // first, torch.arange(LENGTH) // second
        for table in (ids, other, ids):
            found = ca.attention(*inputs, mask_mod=document(table))
            torch.testing.assert_close(found, ca.Attention(mask_mod=document(table), backend="reference")(*inputs))
        del other
        again = torch.arange(LENGTH) // 13
        for table in (again, ids):
            found = ca.attention(*inputs, mask_mod=document(table))
            torch.testing.assert_close(found, ca.Attention(mask_mod=document(table), backend="reference")(*inputs))


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_plans_leave_nothing_behind(count: int, inputs: list[torch.Tensor]) -> None:
    q, k, v = (t[:1, :1, :4] for t in inputs)
    slopes = torch.rand(1)  # lives through all of it
    for step in range(count):
        ids = torch.full((4 + step % 200,), step)  # of 200 forms
        ca.attention(q, k, v, mask_mod=document(ids), score_mod=alibi(slopes))
    del ids
    gc.collect()
    capture = borrowed_for(slopes)
    assert len(capture.dependents) <= 2 * borrowed.IDLE_LIMIT
    assert len(borrowed._idle) <= borrowed.IDLE_LIMIT
    assert len(borrowed._of_tensor) <= len(borrowed._known)
    assert sum(capture in captures for _, captures, _ in plan_cache._plans.values()) <= 2 * borrowed.IDLE_LIMIT


class Marked(torch.Tensor):
    """A tensor of a user's own class, whose writes nobody counts for us."""


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Marked])
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with a view"])
def test_a_tensor_that_is_the_same_stands_for_the_same_memory(kind: Any, shared: bool) -> None:
    tensor = torch.rand(5) if kind is torch.Tensor else torch.Tensor._make_subclass(kind, torch.rand(5))
    view = tensor[1:] if shared else None
    capture = borrowed_for(tensor)
    epoch, unwritten = capture.epoch, capture.unwritten
    assert borrowed_for(tensor) is capture
    if not (shared and kind is Marked):
        assert capture.epoch == epoch
    assert capture.unwritten is unwritten
    assert (unwritten is None) == (shared or kind is Marked)
    tensor.add_(1)
    assert borrowed_for(tensor) is capture
    assert capture.unwritten is not unwritten or unwritten is None
    del view


def test_forms_that_come_in_turns_are_planned_once_each(inputs: list[torch.Tensor], work: Work) -> None:
    lengths = range(8, 8 + 2 * planned._LATEST)
    calls = [lambda n=n: ca.attention(*(t[:, :, :n] for t in inputs), mask_mod=causal()) for n in lengths]
    assert [work.of(call)[1] for call in calls] == [1] * len(calls)
    assert [work.of(call)[1] for call in [*calls, *reversed(calls)]] == [0] * 2 * len(calls)


def test_cached_plans_are_bounded_in_number(inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "LIMIT", len(plan_cache._plans) + 20)
    q, k, v = (t[:1, :1, :4] for t in inputs)
    for step in range(70):
        ca.attention(q, k, v, scale=1.0 + step)
    assert len(plan_cache._plans) <= plan_cache.LIMIT


def test_a_backward_finds_its_tensors_after_the_plan_ended(inputs: list[torch.Tensor]) -> None:
    q, k, v = (t.requires_grad_() for t in inputs)

    def loss() -> torch.Tensor:
        ids, bias = torch.arange(LENGTH) // 5, torch.linspace(0, 1, LENGTH)
        return (
            ca.attention(
                q, k, v, mask_mod=lambda b, h, q, kv: ids[q] >= ids[kv], score_mod=lambda s, b, h, q, kv: s * bias[q]
            )
            .sin()
            .sum()
        )

    found = loss()
    gc.collect()
    plan_cache._plans.clear()
    grads = torch.autograd.grad(found, [q, k, v])
    for x, y in zip(grads, torch.autograd.grad(loss(), [q, k, v]), strict=True):
        torch.testing.assert_close(x, y)


def test_threads_share_a_plan(inputs: list[torch.Tensor]) -> None:
    q, k, v = (t.requires_grad_() for t in inputs)
    slopes = SLOPES.clone().requires_grad_()
    wanted = torch.autograd.grad(ca.attention(q, k, v, score_mod=alibi(slopes), mask_mod=document(IDS)).sum(), slopes)
    failed: list[Any] = []

    def work() -> None:
        for _ in range(20):
            out = ca.attention(q, k, v, score_mod=alibi(slopes), mask_mod=document(IDS))
            (found,) = torch.autograd.grad(out.sum(), slopes)
            if not torch.allclose(found, wanted[0]):
                failed.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_captured_tensors_take_no_weak_references(inputs: list[torch.Tensor]) -> None:
    """Which would stand in the way of `swap_tensors`, and so of `Module.to`."""
    table = torch.arange(LENGTH) // 5
    ca.attention(*inputs, mask_mod=document(table))
    assert not weakref.getweakrefs(table)


# --- a planned Attention -------------------------------------------------------------------------------------------


def _documents(size: int) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32) // size


def _within(ids: torch.Tensor) -> Any:
    return lambda b, h, q, kv: ids[q] == ids[kv]


def test_aliases_whose_writes_are_counted_apart_are_told_apart(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    memory = torch.empty(256, dtype=torch.int32)

    def found(ids: torch.Tensor, backend: str) -> list[torch.Tensor]:
        out = ca.attention(q, k, v, mask_mod=_within(ids), backend=backend)
        return [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]

    for size in (64, 16, 256):
        alias = memory.data  # one counter each: all of them say 1 when they are read
        alias.copy_(_documents(size))
        for now, true in zip(found(alias, "hopper-emulated"), found(_documents(size), "reference"), strict=True):
            torch.testing.assert_close(now, true, atol=3e-2, rtol=3e-2)


READERS: dict[str, tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], dict[str, Any]]]] = {
    "a bias": (torch.arange(LENGTH) / 5.0, torch.arange(LENGTH) % 3.0, lambda t: {"score_mod": _plus(t)}),
    "ids": (torch.arange(LENGTH) // 5, torch.arange(LENGTH) // 3, lambda t: {"mask_mod": document(t)}),
    "limits": (torch.arange(LENGTH), torch.arange(LENGTH) // 2, lambda t: {"mask_mod": lambda b, h, q, kv: kv <= t[q]}),
}


def _plus(table: torch.Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: score + table[kv]


@pytest.mark.parametrize("backend", ["streaming", "hopper-emulated"])
@pytest.mark.parametrize("way", ["written, called", "called, written", "written, called, and with the tensor"])
@pytest.mark.parametrize("name", READERS)
def test_a_gradient_is_refused_where_an_alias_of_what_it_reads_was_written_to_and_borrowed(
    name: str, way: str, backend: str, generator: torch.Generator
) -> None:
    """`x.data` counts its writes apart: torch looks at those of `x` alone."""
    if backend != "streaming":
        pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
    before, after, mods = READERS[name]
    memory = before.clone()
    dim, dtype = (8, torch.float32) if backend == "streaming" else (64, torch.bfloat16)
    x = [torch.randn(1, 1, LENGTH, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3)]

    def out(t: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ca.attention(*x, **mods(t), backend=backend)
        return found.sum()

    of_before, alias = out(memory), memory.data
    if way == "called, written":
        out(alias)
    alias.copy_(after)
    if way != "called, written":
        out(alias)
    if "tensor" in way:
        out(memory)
    with pytest.raises(RuntimeError, match=r"captured since the call as another tensor|modified by an inplace"):
        of_before.backward()
    out(memory).backward()


def test_an_alias_that_nobody_wrote_to_hides_no_gradient(generator: torch.Generator) -> None:
    bias = torch.arange(LENGTH) / 5.0
    x = [torch.randn(1, 1, LENGTH, 8, generator=generator).requires_grad_() for _ in range(3)]
    wanted = torch.autograd.grad(ca.attention(*x, score_mod=_plus(bias)).sin().sum(), x)
    out = ca.attention(*x, score_mod=_plus(bias)).sin().sum()
    ca.attention(*x, score_mod=_plus(bias.data))
    ca.attention(*x, score_mod=_plus(bias))
    assert all(map(torch.equal, torch.autograd.grad(out, x), wanted))


def test_the_counter_of_a_tensor_is_told_from_others_that_say_the_same() -> None:
    x = torch.zeros(4)
    with torch.inference_mode():
        counter = Counter(x)
    x.add_(1)
    apart = x.data
    apart.add_(1)
    assert apart._version == x._version == 1
    assert [counter.counts(t) for t in (x, x[1:], x.detach(), apart)] == [True, True, True, False]
    assert apart._version == x._version == 1
    storage = weakref.ref(x.untyped_storage())
    del x, apart
    assert storage() is None, "the counter holds no memory"


def test_a_view_beside_a_tensor_is_no_other_memory() -> None:
    x = torch.zeros(4)
    capture = borrowed_for(x)
    epoch = capture.epoch
    view = x[:]
    assert borrowed_for(view) is capture and borrowed_for(x) is capture
    assert capture.epoch == epoch


@pytest.mark.parametrize("comes", [True, False])
def test_a_view_that_comes_or_goes_between_two_calls_writes_nothing_that_the_first_one_saved(
    comes: bool, inputs: list[torch.Tensor]
) -> None:
    """A broadcast of a module's buffers in another thread holds one such for a moment."""
    ids = torch.arange(LENGTH) // 5
    x = [t.requires_grad_() for t in inputs]

    def gradient(backend: str) -> Any:
        def out() -> Any:
            return ca.attention(*x, mask_mod=lambda b, h, i, j: ids[i] >= ids[j], backend=backend)

        view = None if comes else ids[:]
        first = out()
        view = ids[:] if comes else None  # noqa: F841
        return torch.autograd.grad((first + out()).sin().sum(), x)

    for found, wanted in zip(gradient("streaming"), gradient("reference"), strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_attention_follows_new_memory_of_the_same_form(inputs: list[torch.Tensor]) -> None:
    ids = torch.arange(LENGTH) // 5
    attention = ca.Attention(mask_mod=causal() & document(ids))
    attention(*inputs)
    for make in (lambda: torch.arange(LENGTH) // 11, lambda: torch.arange(LENGTH) % 3):
        ids.data = make()
        torch.testing.assert_close(attention(*inputs), ca.attention(*inputs, mask_mod=causal() & document(ids)))
    torch.utils.swap_tensors(ids, torch.arange(LENGTH) // 2)
    wanted = ca.attention(*inputs, mask_mod=causal() & document(torch.arange(LENGTH) // 2), backend="reference")
    torch.testing.assert_close(attention(*inputs), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", torch.arange(LENGTH + 9) // 5),
        lambda t: setattr(t, "data", (torch.arange(LENGTH) // 5).int()),
        lambda t: t.resize_(LENGTH + 16).zero_(),
    ],
    ids=["a longer one", "another type", "resized"],
)
def test_an_attention_refuses_a_captured_tensor_of_another_form(change: Any, inputs: list[torch.Tensor]) -> None:
    ids = torch.arange(LENGTH) // 5
    attention = ca.Attention(mask_mod=document(ids))
    attention(*inputs)
    change(ids)
    with pytest.raises(ca.errors.CapturedTensorChanged, match=r"ca\.nn\.Attention"):
        attention(*inputs)


def test_global_tokens_and_other_masks_that_make_tensors_still_work_inline(inputs: list[torch.Tensor]) -> None:
    places = torch.tensor([3, 17])
    for _ in range(2):
        found = ca.attention(*inputs, mask_mod=global_tokens(places) | sliding_window(4))
    wanted = ca.Attention(mask_mod=global_tokens(places) | sliding_window(4), backend="reference")(*inputs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
def test_what_is_recomputed_in_the_backward_finds_its_tensors(
    backend: str, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "composattn.backends.reference.PAIRS_AT_ONCE", LENGTH * LENGTH
    )  # one head at a time: recomputed
    q, k, v = (t.requires_grad_() for t in inputs)
    bias = BIAS.clone().requires_grad_()

    def gradient(call: Callable[..., Any]) -> Any:
        out = call(score_mod=lambda s, b, h, i, j: s + bias[h, j], mask_mod=document(IDS), backend=backend)
        return torch.autograd.grad(out.sin().sum(), [q, k, v, bias])

    found = gradient(lambda **mods: ca.attention(q, k, v, **mods))
    for x, y in zip(found, gradient(lambda **mods: ca.Attention(**mods)(q, k, v)), strict=True):
        torch.testing.assert_close(x, y)


def test_functions_that_say_the_same_share_a_plan_by_what_they_say(
    inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes, others, factor = SLOPES.clone(), SLOPES.clone() + 1, ca.scalar(2.0)

    def made(by: float, of: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return ca.attention(*inputs, score_mod=lambda s, b, h, q, kv: s + by * of[h] * (kv - q), scale=scale)

    def numbered(by: Any) -> torch.Tensor:
        return ca.attention(*inputs, score_mod=lambda s, b, h, q, kv: s * by)

    calls = [
        lambda: made(1.0, slopes), lambda: made(1.5, slopes), lambda: made(1.0, others), lambda: made(1.0, slopes, 0.5),
        lambda: numbered(factor), lambda: numbered(ca.scalar(3.0)), lambda: numbered(4.0),
    ]  # fmt: skip
    first = [call() for call in calls]
    for _ in range(3):
        for call, found in zip(calls, first, strict=True):
            torch.testing.assert_close(call(), found, rtol=0, atol=0)
    assert all(not torch.equal(x, y) for n, x in enumerate(first) for y in first[:n])
    with monkeypatch.context() as patch:  # known by what the function says: no `Score` is made of it
        patch.setattr(Score, "of", None)
        torch.testing.assert_close(made(1.0, others), first[2], rtol=0, atol=0)
        torch.testing.assert_close(made(1.0, slopes, 0.5), first[3], rtol=0, atol=0)
    slopes.mul_(2)
    assert not torch.equal(made(1.0, slopes), first[0])
