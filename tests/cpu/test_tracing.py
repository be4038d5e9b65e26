"""What a mod may look like, and every refusal: by its class, with the user's own line in the message."""

from __future__ import annotations

import copy
import functools
import gc
import math
import operator
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F

from composattn import errors
from composattn.call.block_sparse import BlockSparse
from composattn.graph import expr as graph
from composattn.graph.borrowed import Borrowed, BorrowedCapture
from composattn.graph.expr import Capture, Rate, captures, content_key, index, read, scalars, score
from composattn.graph.scalar import Scalar
from composattn.graph.trace import arity, trace_mask, trace_score
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from tests.support import count_calls

# --- accepted forms -----------------------------------------------------------------------------------------

TABLE = torch.randn(2, 4, 12, 12)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LIMIT = torch.tensor(5)


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def window_of(width, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx - kv_idx <= width


def closure() -> Callable[..., Any]:
    width = 3
    return lambda b, h, q, kv: q - kv <= width


class WindowObject:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= self.width

    def method(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self(b, h, q, kv)

    @staticmethod
    def static(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= 3

    @classmethod
    def of_class(cls, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= 3


class WindowModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(3))

    def forward(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= self.width


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def inner(*args: Any) -> Any:
        return fn(*args)

    return inner


def with_a_default(b: Any, h: Any, q: Any, kv: Any, width: int = 3) -> Any:
    return q - kv <= width


MASKS: dict[str, Callable[..., Any]] = {
    "function": causal,
    "lambda": lambda b, h, q, kv: q >= kv,
    "closure": closure(),
    "partial": functools.partial(window_of, 3),
    "partial by name": functools.partial(lambda b, h, q, kv, width: q - kv <= width, width=3),
    "partial of a partial": functools.partial(functools.partial(window_of), 3),
    "callable object": WindowObject(3),
    "bound method": WindowObject(3).method,
    "static method": WindowObject.static,
    "class method": WindowObject.of_class,
    "module": WindowModule(),
    "decorated": decorated(causal),
    "default argument": with_a_default,
    "any number of arguments": lambda *args: args[2] >= args[3],
    "nested mods": lambda b, h, q, kv: causal(b, h, q, kv) & (closure()(b, h, q, kv) | (kv < 2)),
    "nested with other positions": lambda b, h, q, kv: causal(b, h, q // 4, kv // 4),
    "Mask inside a mod": lambda b, h, q, kv: Mask.of(causal)(b, h, q % 5, kv % 5),
    "and_masks": flex.and_masks(causal, closure()),
    "or_masks": flex.or_masks(closure(), lambda b, h, q, kv: kv < 2),
    "noop_mask": flex.noop_mask,
    "and_masks of a Mask": flex.and_masks(causal, Mask.of(closure())),
    "constant": lambda b, h, q, kv: True,
    "per head": lambda b, h, q, kv: torch.where(h < 2, q >= kv, q - kv < 4),
    "per batch": lambda b, h, q, kv: kv < torch.tensor([3, 9])[b],
    "0-d tensor": lambda b, h, q, kv: q - kv <= LIMIT,
    "0-d tensor on the left": lambda b, h, q, kv: LIMIT >= q - kv,  # noqa: SIM300
    "read of rank 4": lambda b, h, q, kv: TABLE[b, h, q, kv] > 0,
    "two reads of one tensor": lambda b, h, q, kv: TABLE[0, 0, 0, q] > TABLE[0, 0, 0, kv],
    "read row by row": lambda b, h, q, kv: TABLE[b][h][q, kv] > 0,
    "read with an ellipsis": lambda b, h, q, kv: TABLE[b, h, ..., q, kv] > 0,
    "read at a negative position": lambda b, h, q, kv: TABLE[b, h, -1, kv - 12] > 0,
    "read of a read": lambda b, h, q, kv: TABLE[b, h, TABLE[b, h, q, 0].abs().clamp(0, 3).int(), kv] > 0,
    "unpacked row": lambda b, h, q, kv: (lambda lo, hi: (q >= lo) & (kv < hi))(*torch.tensor([[1, 9], [2, 8]])[b]),
    "unpacked tensor": lambda b, h, q, kv: (lambda lo, hi: (q >= lo) & (kv < hi))(*torch.tensor([1, 9])),
    "a Python loop": lambda b, h, q, kv: functools.reduce(lambda x, y: x | y, [q - kv == n for n in (0, 1, 4)]),
    "constant tensors on the fly": lambda b, h, q, kv: q - kv < torch.full((), 4, device=q.device),
    "numpy scalar": lambda b, h, q, kv: q - kv <= np.int64(3),
    "numpy scalar on the left": lambda b, h, q, kv: np.float32(0.5) * q >= np.int64(1) + kv,
    "shape of a captured tensor": lambda b, h, q, kv: kv < TABLE.shape[-1] // 2 + len(SLOPES) - TABLE.size(0),
    "finfo": lambda b, h, q, kv: q * 1.0 > torch.finfo(torch.float32).eps,
    "math": lambda b, h, q, kv: math.floor(q / 4) == math.floor(kv / 4),
    "bit tricks": lambda b, h, q, kv: ((q ^ kv) & ~3) == 0,
    "logical functions": lambda b, h, q, kv: torch.logical_or(torch.logical_not(q < kv), kv.eq(0)),
}

SCORES: dict[str, Callable[..., Any]] = {
    "unchanged": lambda score, b, h, q, kv: score,
    "noop": flex._identity if hasattr(flex, "_identity") else lambda score, b, h, q, kv: score,
    "alibi": lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q),
    "softcap": lambda score, b, h, q, kv: 30.0 * torch.tanh(score / 30.0),
    "bias": lambda score, b, h, q, kv: score + TABLE[b, h, q, kv],
    "mask as -inf": lambda score, b, h, q, kv: torch.where(q >= kv, score, float("-inf")),
    "mask by tensor of -inf": lambda score, b, h, q, kv: torch.where(
        q >= kv, score, torch.tensor(float("-inf"), dtype=score.dtype, device=score.device)
    ),
    "masked_fill": lambda score, b, h, q, kv: score.masked_fill(q < kv, torch.finfo(score.dtype).min),
    "a tensor in a list of itself": lambda score, b, h, q, kv: score * (2.0 if LIMIT in [LIMIT] else 1.0),
    "looked up by a tensor": lambda score, b, h, q, kv: score * {LIMIT: 2.0}[LIMIT],
    "partial": functools.partial(lambda cap, score, b, h, q, kv: cap * torch.tanh(score / cap), 20.0),
    "mask used inside": lambda score, b, h, q, kv: torch.where(Mask.of(causal)(b, h, q, kv), score, -1e4),
    "an integer": lambda score, b, h, q, kv: q - kv,
    "a constant": lambda score, b, h, q, kv: 0.0,
    "methods": lambda score, b, h, q, kv: score.mul(2).add(SLOPES[h]).sigmoid().log(),
    "data": lambda score, b, h, q, kv: score + SLOPES.data[h],
}


def grid() -> tuple[torch.Tensor, ...]:
    return torch.meshgrid(*map(torch.arange, (2, 4, 12, 12)), indexing="ij")


def eager(fn: Callable[..., Any], *values: torch.Tensor) -> torch.Tensor:
    """`fn` called on 0-d tensors, point by point, as FlexAttention defines it."""
    flat = [v.reshape(-1) for v in values]
    out = [torch.as_tensor(fn(*(v[i] for v in flat))) for i in range(0, len(flat[0]), 7)]
    return torch.stack(out)


@pytest.mark.parametrize("name", MASKS)
def test_mask_forms(name: str) -> None:
    fn = MASKS[name]
    places = grid()
    got = Mask.of(fn)(*places).expand(places[0].shape).reshape(-1)[::7]
    assert torch.equal(got, eager(fn, *places))


def test_divmod_gives_quotient_and_remainder() -> None:
    """Row and column of a pixel; torch's own tensors have no divmod."""
    row_and_column = Mask.of(lambda b, h, q, kv: (divmod(q, 8)[0] == divmod(kv, 8)[0]) | (divmod(kv, 8)[1] == 0))
    written_out = Mask.of(lambda b, h, q, kv: (q // 8 == kv // 8) | (kv % 8 == 0))
    assert torch.equal(row_and_column(*grid()), written_out(*grid()))


def test_a_numpy_array_of_one_is_a_number_and_longer_ones_are_refused() -> None:
    places = grid()
    for number in (np.array(3), np.int64(3), np.array(3.0)):
        for fn in (lambda b, h, q, kv, n=number: q - kv == n, lambda b, h, q, kv, n=number: n == q - kv):  # type: ignore[misc]
            assert torch.equal(Mask.of(fn)(*places), places[2] - places[3] == 3)
        differs = Mask.of(lambda b, h, q, kv, n=number: q != n)  # of which torch makes a True
        assert torch.equal(differs(*places).expand_as(places[2]), places[2] != 3)
    for compare in (operator.eq, operator.ne, operator.lt):
        with pytest.raises(errors.UnsupportedOperation, match="ndarray"):
            Mask.of(lambda b, h, q, kv, compare=compare: compare(q, np.arange(12)))  # type: ignore[misc]


@pytest.mark.parametrize("name", SCORES)
def test_score_forms(name: str) -> None:
    fn = SCORES[name]
    places = grid()
    scores = torch.randn(places[0].shape, dtype=torch.float32)
    got = Score.of(fn)(scores, *places).expand(scores.shape).reshape(-1)[::7]
    torch.testing.assert_close(got, eager(fn, scores, *places).float(), rtol=1e-6, atol=1e-6)


def test_module_with_a_parameter_is_captured_by_reference() -> None:
    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4))

        def forward(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + self.table[h]

    module = Bias()
    assert captures(trace_score(module)) == (Capture(module.table),)


def test_detach_is_taken_where_it_cuts_nothing_and_refused_where_it_does() -> None:
    learned = torch.ones(4, requires_grad=True)
    trace_score(lambda score, b, h, q, kv: score + SLOPES[h].detach() * (q - kv).detach())
    for cut in (lambda s, b, h, q, kv: s.detach(), lambda s, b, h, q, kv: s + learned[h].detach()):
        with pytest.raises(errors.UnsupportedOperation, match="detach"):
            trace_score(cut)


# --- scalars, types, rates, keys ----------------------------------------------------------------------------


def test_scalars_are_run_time_values_and_numbers_are_constants() -> None:
    width = Scalar(3)
    expr = trace_mask(lambda b, h, q, kv: q - kv <= width * 2 + 1)
    assert scalars(expr) == (width,)
    assert scalars(trace_mask(lambda b, h, q, kv: q - kv <= 7)) == ()
    assert "ca.scalar(3)" in repr(expr)
    width.value = 5
    assert bool(Mask(expr)(0, 0, 11, 0))
    assert not bool(Mask(expr)(0, 0, 12, 0))


@pytest.mark.parametrize("bad", [True, "3", None, 1j, torch.tensor(3)], ids=repr)
def test_scalar_refuses_what_is_no_real_number(bad: Any) -> None:
    with pytest.raises(errors.UnsupportedCapture):
        Scalar(bad)
    with pytest.raises(errors.UnsupportedCapture):
        Scalar(1.0).value = bad


def test_an_integer_scalar_stays_one() -> None:
    with pytest.raises(errors.UnsupportedCapture, match=r"2\.5"):
        Scalar(3).value = 2.5


def test_equal_mods_are_one_graph_whatever_their_source() -> None:
    def one(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv <= 4)

    width = 2
    other = lambda batch, head, i, j: torch.logical_and(i.ge(j), i.sub(j) <= width * 2)  # noqa: E731
    assert trace_mask(one) is trace_mask(other)


def test_closures_over_other_numbers_are_other_graphs() -> None:
    def window(n: int) -> Callable[..., Any]:
        return lambda b, h, q, kv: q - kv <= n

    made = [window(1), window(2)]
    assert made[0].__code__ is made[1].__code__
    assert content_key(trace_mask(made[0])) != content_key(trace_mask(made[1]))


def test_key_is_content_not_tensors() -> None:
    def with_table(table: torch.Tensor) -> Any:
        return trace_score(lambda s, b, h, q, kv: s + table[h] + table[0])

    a, b = with_table(torch.randn(4)), with_table(torch.randn(4))
    assert a is not b
    assert content_key(a) == content_key(b)
    assert content_key(a) != content_key(with_table(torch.randn(4, dtype=torch.float64)))
    stand_in = BorrowedCapture()
    with Borrowed([stand_in], [torch.randn(4)], [None]):
        keys = {content_key(read(capture, (index("h"),))) for capture in (stand_in, Capture(torch.randn(4)))}
    assert len(keys) == 1, "a kernel reads a borrowed tensor as any other"
    two = torch.randn(4), torch.randn(4)
    mixed = trace_score(lambda s, b, h, q, kv: s + two[0][h] + two[1][0])
    assert content_key(a) != content_key(mixed), "one tensor read twice is not two tensors"
    assert content_key(trace_score(lambda s, b, h, q, kv: s * Scalar(2.0))) == content_key(
        trace_score(lambda s, b, h, q, kv: s * Scalar(3.0))
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), (1.0, math.nextafter(1.0, 2.0)), (2**31 - 1, 2**31)],
    ids=lambda v: repr(v),
)
def test_constants_that_python_calls_equal_stay_apart(one: Any, other: Any) -> None:
    keys = {content_key(trace_score(lambda s, b, h, q, kv, n=n: torch.where(s > 0, s, n))) for n in (one, other)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("mod", "rate"),
    [
        (lambda s, b, h, q, kv: 3.0, Rate.CONSTANT),
        (lambda s, b, h, q, kv: SLOPES[h] * b, Rate.HEAD),
        (lambda s, b, h, q, kv: q * SLOPES[h], Rate.ROW),
        (lambda s, b, h, q, kv: kv * SLOPES[h], Rate.COLUMN),
        (lambda s, b, h, q, kv: q - kv, Rate.ELEMENT),
        (lambda s, b, h, q, kv: s, Rate.ELEMENT),
        (lambda s, b, h, q, kv: LIMIT * 1.0, Rate.HEAD),
    ],
    ids=["constant", "head", "row", "column", "element", "score", "run-time number"],
)
def test_rates(mod: Callable[..., Any], rate: Rate) -> None:
    assert trace_score(mod).rate is rate


def test_nodes_and_tensors_are_freed_with_the_mod() -> None:
    table = torch.randn(8)
    scalar = Scalar(2.0)
    mod = functools.partial(lambda t, x, s, b, h, q, kv: s + t[h] * x, table, scalar)
    held = trace_score(mod)
    gone = [weakref.ref(table), weakref.ref(held)]
    del table, scalar, held, mod
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_mods_pickle() -> None:
    mod = Score.of(lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e4) * SLOPES[h] + h * 0.5)
    again = pickle.loads(pickle.dumps(mod))
    assert content_key(again.expr) == content_key(mod.expr)
    assert torch.equal(captures(again.expr)[0].tensor, SLOPES)
    mask = Mask.of(causal)
    assert pickle.loads(pickle.dumps(mask)).expr is mask.expr


def test_masks_and_scores_take_weak_references_and_copies_are_as_before() -> None:
    blocks = BlockSparse(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16)
    for mod in (Mask.of(causal), Score.of(lambda s, b, h, q, kv: s * 2.0), blocks):
        kept = weakref.WeakKeyDictionary({mod: 1})
        assert kept[mod] == 1 and copy.copy(mod).expr is mod.expr
        assert pickle.loads(pickle.dumps(mod)).name == mod.name


def test_deep_graphs_pickle_and_copy() -> None:
    def deep(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return functools.reduce(lambda x, n: torch.where(kv == n, q >= n % 3, x), range(2000), q >= kv)

    mask = Mask.of(deep)
    assert pickle.loads(pickle.dumps(mask)).expr is mask.expr and copy.deepcopy(mask).expr is mask.expr


def test_a_deep_copy_of_a_module_reads_its_own_parameters_and_scalars() -> None:
    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4))
            self.width = Scalar(3)
            self.mod = Score.of(lambda s, b, h, q, kv: s + self.table[h] * self.width)

    first = Bias()
    second = copy.deepcopy(first)
    assert captures(second.mod.expr) == (Capture(second.table),)
    assert scalars(second.mod.expr) == (second.width,)
    assert captures(first.mod.expr) == (Capture(first.table),)


def test_dead_entries_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph._sweep()
    alive = len(graph._interned)  # of all tests before
    monkeypatch.setattr(graph, "_sweep_at", alive + 500)
    for n in range(1000):
        trace_mask(lambda b, h, q, kv, n=n: q - kv <= n + 123_456)
    assert len(graph._interned) < alive + 1000


def test_threads_build_the_same_nodes() -> None:
    made: list[Any] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        made.append([trace_mask(lambda b, h, q, kv, n=n: (q - kv <= n) | (kv < n)) for n in range(300)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(x is y for other in made[1:] for x, y in zip(made[0], other, strict=True))


def test_random_bytes_of_a_key_do_not_depend_on_order() -> None:
    # a graph built from parts in another order is the same graph, and has the same key
    parts = [trace_mask(lambda b, h, q, kv, n=n: q - kv == n) for n in range(6)]
    random.shuffle(parts)
    again = [trace_mask(lambda b, h, q, kv, n=n: q - kv == n) for n in range(6)]
    assert {content_key(p) for p in parts} == {content_key(p) for p in again}


def test_tracing_takes_few_steps() -> None:
    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & ((q - kv <= 1024) | (kv < 4))

    trace_mask(mod)
    # 149 for 6 operations, 15 us on a quiet machine
    assert count_calls(lambda: trace_mask(mod)) < 300


def test_nested_calls_substitute() -> None:
    shifted = Mask.of(lambda b, h, q, kv: causal(b, h, q + 2, kv))
    assert trace_mask(shifted) is trace_mask(lambda b, h, q, kv: q + 2 >= kv)
    doubled = Score.of(lambda s, b, h, q, kv: s * 2)
    assert trace_score(lambda s, b, h, q, kv: doubled(doubled(s, b, h, q, kv), b, h, q, kv)) is trace_score(
        lambda s, b, h, q, kv: s * 2 * 2
    )


def test_leaves_are_what_they_say() -> None:
    assert trace_score(lambda s, b, h, q, kv: s) is score()
    assert trace_score(lambda s, b, h, q, kv: s * kv).args == (score(), index("kv"))


def test_arity() -> None:
    assert arity(causal) == 4
    assert arity(functools.partial(window_of, 3)) == 4
    assert arity(with_a_default) == 4
    assert arity(decorated(causal)) == 4, "functools.wraps passes the signature on"
    assert arity(lambda *args: None) is None
    assert arity(WindowObject(3)) == 4
    assert arity(lambda a, b, /, c, *, d=1: None) == 3


# --- refusals -----------------------------------------------------------------------------------------------

VECTOR = torch.arange(12.0)
LONG = torch.arange(100.0)
LEARNED = torch.ones(12, requires_grad=True)
PYTHON_LIST = [1.0, 2.0, 3.0]
NUMPY = np.arange(12)


def branch(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    if q > kv:
        return s
    return s - 1


def loop(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    while q > kv:
        q = q - 1
    return s


def early(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    assert q >= 0
    return s


def for_range(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    for _ in range(q):
        s = s + 1
    return s


def add_assign(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    s += 1.0
    return s


def item_assign(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    VECTOR[q] = 1.0
    return s


def item_assign_of_a_proxy(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    s[0] = 1.0
    return s


def captured_add_assign(s, b, h, q, kv):  # type: ignore[no-untyped-def]
    limit = LIMIT
    limit += 1
    return s + limit


REFUSED: dict[str, tuple[type[errors.TraceError], Callable[..., Any], str]] = {
    # name: (error, score mod, text of the line that must be quoted)
    "if": (errors.DataDependentBranch, branch, "if q > kv:"),
    "while": (errors.DataDependentBranch, loop, "while q > kv:"),
    "assert": (errors.DataDependentBranch, early, "assert q >= 0"),
    "and": (errors.DataDependentBranch, lambda s, b, h, q, kv: (q > 1) and s, "(q > 1) and s"),
    "or": (errors.DataDependentBranch, lambda s, b, h, q, kv: (q > 1) or s, "(q > 1) or s"),
    "not": (errors.DataDependentBranch, lambda s, b, h, q, kv: s * (not q), "s * (not q)"),
    "chained comparison": (errors.DataDependentBranch, lambda s, b, h, q, kv: s * (0 <= q < 4), "0 <= q < 4"),
    "conditional": (errors.DataDependentBranch, lambda s, b, h, q, kv: s if q > 1 else 0.0, "s if q > 1 else"),
    "builtin max": (errors.DataDependentBranch, lambda s, b, h, q, kv: max(s, 0.0), "max(s, 0.0)"),
    "builtin min": (errors.DataDependentBranch, lambda s, b, h, q, kv: min(q, kv) + s, "min(q, kv)"),
    "membership": (errors.DataDependentBranch, lambda s, b, h, q, kv: s * (q in [1, 2]), "q in [1, 2]"),
    "membership in captured": (
        errors.UnsupportedOperation,
        lambda s, b, h, q, kv: s * (2.0 in VECTOR),
        "2.0 in VECTOR",
    ),
    "captured among others": (errors.DataDependentBranch, lambda s, b, h, q, kv: s * (LIMIT in [LONG, 5]), "in [LONG"),
    "if on a captured number": (errors.DataDependentBranch, lambda s, b, h, q, kv: s if LIMIT else 0.0, "if LIMIT"),
    "if on a captured element": (
        errors.DataDependentBranch,
        lambda s, b, h, q, kv: s if VECTOR[0] else 0.0,
        "if VECTOR[0]",
    ),
    "sum": (errors.ReductionInMod, lambda s, b, h, q, kv: s.sum(), "s.sum()"),
    "torch.sum": (errors.ReductionInMod, lambda s, b, h, q, kv: torch.sum(s), "torch.sum(s)"),
    "softmax of captured": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + LONG.softmax(-1)[q], "LONG.softmax(-1)"),
    "max over a dimension": (errors.ReductionInMod, lambda s, b, h, q, kv: torch.max(s, 0), "torch.max(s, 0)"),
    "max alone": (errors.ReductionInMod, lambda s, b, h, q, kv: s.max(), "s.max()"),
    "softmax": (errors.ReductionInMod, lambda s, b, h, q, kv: torch.softmax(s, -1), "torch.softmax"),
    "dot of long vectors": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + torch.dot(LONG, LONG), "torch.dot"),
    "product of matrices": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + TABLE[b, h] @ TABLE[b, h], "TABLE[b"),
    "stack": (errors.UnindexedTensor, lambda s, b, h, q, kv: torch.stack([s, q]), "torch.stack"),
    "any": (errors.ReductionInMod, lambda s, b, h, q, kv: (q > kv).any() * s, ".any()"),
    "item": (errors.ScalarExtraction, lambda s, b, h, q, kv: s.item(), "s.item()"),
    "item of captured": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + LIMIT.item(), "LIMIT.item()"),
    "item of an element": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + VECTOR[2].item(), "VECTOR[2].item()"),
    "tolist of captured": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + VECTOR.tolist()[0], "VECTOR.tolist()"),
    "int": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + int(q), "int(q)"),
    "float": (errors.ScalarExtraction, lambda s, b, h, q, kv: float(s), "float(s)"),
    "float of captured": (errors.ScalarExtraction, lambda s, b, h, q, kv: s * float(LIMIT), "float(LIMIT)"),
    "math function": (errors.ScalarExtraction, lambda s, b, h, q, kv: math.exp(s), "math.exp(s)"),
    "range": (errors.ScalarExtraction, for_range, "range(q)"),
    "range of captured": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + len(range(LIMIT)), "range(LIMIT)"),
    "list index": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + PYTHON_LIST[h], "PYTHON_LIST[h]"),
    "numpy index": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + NUMPY[q], "NUMPY[q]"),
    "dict key": (errors.ScalarExtraction, lambda s, b, h, q, kv: s + {0: 1.0}[h], "{0: 1.0}[h]"),
    "set membership": (errors.ScalarExtraction, lambda s, b, h, q, kv: s * (q in {1, 2}), "q in {1, 2}"),
    "iteration": (errors.ScalarExtraction, lambda s, b, h, q, kv: sum(x for x in s), "for x in s"),
    "+=": (errors.InPlaceWrite, add_assign, "s += 1.0"),
    "+= on captured": (errors.InPlaceWrite, captured_add_assign, "limit += 1"),
    "write to captured": (errors.InPlaceWrite, item_assign, "VECTOR[q] = 1.0"),
    "write to score": (errors.InPlaceWrite, item_assign_of_a_proxy, "s[0] = 1.0"),
    "add_": (errors.InPlaceWrite, lambda s, b, h, q, kv: s.add_(1), "s.add_(1)"),
    "clamp_": (errors.InPlaceWrite, lambda s, b, h, q, kv: torch.clamp_(s, 0), "torch.clamp_"),
    "captured mul_": (errors.InPlaceWrite, lambda s, b, h, q, kv: s + VECTOR.mul_(2)[q], "VECTOR.mul_(2)"),
    "inplace=": (errors.InPlaceWrite, lambda s, b, h, q, kv: (F.silu(s, inplace=True), s)[1], "inplace=True"),
    "inplace by position": (errors.InPlaceWrite, lambda s, b, h, q, kv: (F.elu(s, 1.0, True), s)[1], "F.elu"),
    "out=": (errors.InPlaceWrite, lambda s, b, h, q, kv: torch.tanh(s, out=VECTOR[0]), "out=VECTOR[0]"),
    "rand_like": (errors.RandomNumber, lambda s, b, h, q, kv: s + torch.rand_like(s), "rand_like"),
    "rand": (errors.RandomNumber, lambda s, b, h, q, kv: s + torch.rand(()), "torch.rand(())"),
    "dropout": (errors.RandomNumber, lambda s, b, h, q, kv: torch.nn.functional.dropout(s, 0.1), "dropout(s, 0.1)"),
    "bernoulli": (errors.RandomNumber, lambda s, b, h, q, kv: s * torch.bernoulli(s), "bernoulli"),
    "uniform_": (errors.RandomNumber, lambda s, b, h, q, kv: s.uniform_(), "uniform_"),
    "constant read beyond": (errors.ConstantIndexOutOfRange, lambda s, b, h, q, kv: s + VECTOR[12], "VECTOR[12]"),
    "constant read before": (
        errors.ConstantIndexOutOfRange,
        lambda s, b, h, q, kv: s + TABLE[b, -5, q, kv],
        "TABLE[b, -5",
    ),
    "too few indices": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + TABLE[b, h], "TABLE[b, h]"),
    "too many indices": (errors.InvalidRead, lambda s, b, h, q, kv: s + VECTOR[q, kv], "VECTOR[q, kv]"),
    "slice": (errors.InvalidRead, lambda s, b, h, q, kv: s + TABLE[b, h, :, kv], "TABLE[b, h, :, kv]"),
    "None in a read": (errors.InvalidRead, lambda s, b, h, q, kv: s + VECTOR[q, None], "VECTOR[q, None]"),
    "list in a read": (errors.InvalidRead, lambda s, b, h, q, kv: s + VECTOR[[0, 1]], "VECTOR[[0, 1]]"),
    "float index": (errors.InvalidRead, lambda s, b, h, q, kv: s + VECTOR[q / 2], "VECTOR[q / 2]"),
    "bool index": (errors.InvalidRead, lambda s, b, h, q, kv: s + VECTOR[q > kv], "VECTOR[q > kv]"),
    "score indexed": (errors.InvalidRead, lambda s, b, h, q, kv: s[0], "s[0]"),
    "whole tensor": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + VECTOR, "s + VECTOR"),
    "whole tensor on the left": (errors.UnindexedTensor, lambda s, b, h, q, kv: VECTOR + s, "VECTOR + s"),
    "work on a whole tensor": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + (VECTOR * 2)[q], "(VECTOR * 2)[q]"),
    "whole learned tensor": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + LEARNED.exp()[q], "LEARNED.exp()"),
    "row used as a number": (errors.UnindexedTensor, lambda s, b, h, q, kv: torch.exp(TABLE[b, h]), "TABLE[b, h]"),
    "method of a row": (errors.UnindexedTensor, lambda s, b, h, q, kv: s + TABLE[b, h].exp(), "TABLE[b, h].exp()"),
    "unknown function": (errors.UnsupportedOperation, lambda s, b, h, q, kv: torch.lgamma(s), "torch.lgamma(s)"),
    "unknown method": (errors.UnsupportedOperation, lambda s, b, h, q, kv: s.flip(0), "s.flip(0)"),
    "transpose": (errors.UnsupportedOperation, lambda s, b, h, q, kv: s.T, "s.T"),
    "new tensor with a shape": (errors.UnsupportedOperation, lambda s, b, h, q, kv: s.new_zeros(3), "s.new_zeros(3)"),
    "rounding to decimals": (
        errors.UnsupportedOperation,
        lambda s, b, h, q, kv: torch.round(s, decimals=2),
        "decimals=2",
    ),
    "builtin round to decimals": (errors.UnsupportedOperation, lambda s, b, h, q, kv: round(s, 2), "round(s, 2)"),
    "too many arguments": (errors.UnsupportedOperation, lambda s, b, h, q, kv: torch.exp(s, 2), "torch.exp(s, 2)"),
    "cast to complex": (errors.UnsupportedOperation, lambda s, b, h, q, kv: s.to(torch.complex64), "torch.complex64"),
    "where alone": (errors.UnsupportedOperation, lambda s, b, h, q, kv: torch.where(q > kv), "torch.where(q > kv)"),
    "a list as a value": (errors.UnsupportedOperation, lambda s, b, h, q, kv: torch.where(q > kv, s, [1]), "[1]"),
    "~ of a float": (errors.TypeMismatch, lambda s, b, h, q, kv: ~s, "~s"),
    "& of floats": (errors.TypeMismatch, lambda s, b, h, q, kv: s & 1.5, "s & 1.5"),
    "- of bools": (errors.TypeMismatch, lambda s, b, h, q, kv: (q > 1) - (kv > 1), "(q > 1) - (kv > 1)"),
    "where on an int": (errors.TypeMismatch, lambda s, b, h, q, kv: torch.where(q, s, 0.0), "torch.where(q, s"),
    "shift of a float": (errors.TypeMismatch, lambda s, b, h, q, kv: s << 1, "s << 1"),
    "shift too far": (errors.TypeMismatch, lambda s, b, h, q, kv: q << 40, "q << 40"),
    "integer division by zero": (errors.TypeMismatch, lambda s, b, h, q, kv: s + q // 0, "q // 0"),
    "modulo zero": (errors.TypeMismatch, lambda s, b, h, q, kv: s + q % 0, "q % 0"),
    "integer to a negative power": (errors.TypeMismatch, lambda s, b, h, q, kv: s + q**-1, "q**-1"),
    "complex captured": (errors.TypeMismatch, lambda s, b, h, q, kv: s + torch.tensor([1j])[h], "1j"),
    "returns nothing": (errors.WrongReturn, lambda s, b, h, q, kv: None, "lambda s, b, h, q, kv: None"),
    "returns a tuple": (errors.WrongReturn, lambda s, b, h, q, kv: (s, q), "(s, q)"),
    "returns a bool": (errors.WrongReturn, lambda s, b, h, q, kv: q >= kv, "q >= kv"),
    "returns a whole tensor": (errors.UnindexedTensor, lambda s, b, h, q, kv: VECTOR, "VECTOR"),
    "returns a row": (errors.UnindexedTensor, lambda s, b, h, q, kv: TABLE[b, h], "TABLE[b, h]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_users_line(name: str) -> None:
    error, mod, line = REFUSED[name]
    before = VECTOR.clone(), LIMIT.clone()
    with pytest.raises(error) as caught:
        trace_score(mod)
    assert type(caught.value) is error
    assert isinstance(caught.value, errors.ComposattnError)
    assert __file__ in str(caught.value)
    quoted = str(caught.value.line)
    assert line in quoted, f"{line!r} is not in {quoted!r}"
    assert torch.equal(before[0], VECTOR) and torch.equal(before[1], LIMIT), "a refused write has not happened"


@pytest.mark.parametrize("name", sorted({n for n, (e, *_) in REFUSED.items() if not n.startswith("returns")}))
def test_refused_in_masks_too(name: str) -> None:
    error, mod, _ = REFUSED[name]
    with pytest.raises(error):
        trace_mask(lambda b, h, q, kv: mod(q * 1.5, b, h, q, kv) > 0)


MASK_REFUSED: dict[str, tuple[type[errors.ComposattnError], Callable[..., Any] | Any, str]] = {
    "returns a float": (errors.WrongReturn, lambda b, h, q, kv: (q - kv) * 0.5, "score_mod"),
    "returns an int": (errors.WrongReturn, lambda b, h, q, kv: q - kv, "compare"),
    "returns nothing": (errors.WrongReturn, lambda b, h, q, kv: None, "NoneType"),
    "score mod": (errors.WrongSignature, lambda s, b, h, q, kv: s, "a score_mod takes 5"),
    "three arguments": (errors.WrongSignature, lambda b, h, q: q > 0, "takes 3 positional"),
    "no arguments": (errors.WrongSignature, lambda: True, "takes 0 positional"),
    "a keyword that is not bound": (errors.WrongSignature, lambda b, h, q, kv, *, w: q > w, "keyword argument w"),
    "not a function": (errors.WrongSignature, 3, "got int"),
    "a tensor": (errors.WrongSignature, torch.ones(2, 2, dtype=torch.bool), "got Tensor"),
}


@pytest.mark.parametrize("name", MASK_REFUSED)
def test_mask_refused(name: str) -> None:
    error, mod, text = MASK_REFUSED[name]
    with pytest.raises(error, match=text):
        trace_mask(mod)


def test_score_of_a_mask_signature() -> None:
    with pytest.raises(errors.WrongSignature, match="a mask_mod takes 4"):
        trace_score(lambda b, h, q, kv: q >= kv)


def test_errors_of_the_user_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        trace_mask(lambda b, h, q, kv: q > 1 / 0)
    with pytest.raises(AttributeError, match="nonsense"):
        trace_mask(lambda b, h, q, kv: q.nonsense > 0)


def test_after_a_refusal_torch_is_as_before() -> None:
    with pytest.raises(errors.DataDependentBranch):
        trace_score(branch)
    assert float(torch.ones(3).sum()) == 3.0
    assert torch.rand(2).shape == (2,)


def test_proxies_print_for_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    def mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        print(q - kv)
        return q >= kv

    trace_mask(mod)
    assert capsys.readouterr().out == "Proxy(sub(q, kv))\n"
