"""Every ready mask against a plain loop over (b, h, q, kv) that says the same in Python's words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composattn import errors
from composattn.graph.scalar import Scalar
from composattn.mods import masks
from composattn.mods.mask import Mask

Rule = Callable[[int, int, int, int], bool]


def check(mask: Mask, rule: Rule, *, batch: int = 2, heads: int = 2, q_len: int, kv_len: int) -> None:
    """`mask` on the whole grid equals `rule` at every point of it."""
    b, h, q, kv = torch.meshgrid(*map(torch.arange, (batch, heads, q_len, kv_len)), indexing="ij")
    got = mask(b, h, q, kv, q_len=torch.tensor(q_len), kv_len=torch.tensor(kv_len)).expand(b.shape)
    points = itertools.product(range(batch), range(heads), range(q_len), range(kv_len))
    wanted = torch.tensor([bool(rule(*p)) for p in points]).reshape(b.shape)
    assert got.dtype is torch.bool
    assert torch.equal(got, wanted), f"{mask.name}: {mask.expr!r}\n{(got != wanted).nonzero()[:5]}"


lengths = st.integers(1, 17)
widths = st.integers(0, 12)


@given(lengths, lengths)
def test_causal_top_left(q_len: int, kv_len: int) -> None:
    check(masks.causal(), lambda b, h, q, kv: kv <= q, q_len=q_len, kv_len=kv_len)


@given(lengths, lengths)
def test_causal_bottom_right_puts_the_last_query_at_the_last_key(q_len: int, kv_len: int) -> None:
    def rule(b: int, h: int, q: int, kv: int) -> bool:
        return kv_len - 1 - kv >= q_len - 1 - q

    check(masks.causal(align="bottom_right"), rule, q_len=q_len, kv_len=kv_len)


@given(lengths, lengths, widths)
def test_window_of_the_past(q_len: int, kv_len: int, left: int) -> None:
    check(masks.sliding_window(left), lambda b, h, q, kv: kv >= q - left, q_len=q_len, kv_len=kv_len)


@given(lengths, lengths, st.none() | widths, widths, st.booleans())
def test_window_with_two_sides(q_len: int, kv_len: int, left: int | None, right: int, bottom: bool) -> None:
    shift = kv_len - q_len if bottom else 0

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        here = q + shift
        return (left is None or here - left <= kv) and kv <= here + right

    mask = masks.sliding_window((left, right), align="bottom_right" if bottom else "top_left")
    check(mask, rule, q_len=q_len, kv_len=kv_len)


def test_window_by_head_and_by_scalar() -> None:
    left = torch.tensor([1, 5], dtype=torch.int32)
    check(masks.sliding_window(left), lambda b, h, q, kv: kv >= q - [1, 5][h], q_len=11, kv_len=13)
    width = Scalar(3)
    mask = masks.sliding_window((width, 0))
    check(mask, lambda b, h, q, kv: q - 3 <= kv <= q, q_len=7, kv_len=9)
    width.value = 1
    check(mask, lambda b, h, q, kv: q - 1 <= kv <= q, q_len=7, kv_len=9)


@pytest.mark.parametrize(
    ("prefix", "of_batch"),
    [(4, (4, 4)), (0, (0, 0)), (Scalar(3), (3, 3)), (torch.tensor(2), (2, 2)), (torch.tensor([1, 6]), (1, 6))],
    ids=["int", "zero", "scalar", "0-d tensor", "one per batch entry"],
)
def test_prefix_lm(prefix: Any, of_batch: tuple[int, int]) -> None:
    check(masks.prefix_lm(prefix), lambda b, h, q, kv: kv < of_batch[b] or kv <= q, q_len=9, kv_len=9)


@given(st.data())
def test_document_ids(data: st.DataObject) -> None:
    q_len, kv_len = data.draw(lengths), data.draw(lengths)
    shape = data.draw(st.sampled_from(["shared", "batch"]))

    def draw(n: int) -> torch.Tensor:
        ids = st.lists(st.integers(-2, 3), min_size=n, max_size=n)
        return torch.tensor(data.draw(ids)) if shape == "shared" else torch.tensor([data.draw(ids), data.draw(ids)])

    q_ids, kv_ids = draw(q_len), draw(kv_len)

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        of_q, of_kv = (q_ids, kv_ids) if shape == "shared" else (q_ids[b], kv_ids[b])
        return bool(of_q[q] == of_kv[kv])

    check(masks.document(q_ids, kv_ids), rule, q_len=q_len, kv_len=kv_len)
    again = masks.document(q_ids)
    check(
        again,
        lambda b, h, q, kv: bool(q_ids.expand(2, -1)[b, q] == q_ids.expand(2, -1)[b, kv]),
        q_len=q_len,
        kv_len=q_len,
    )


document_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda n: sum(n) > 0)


def cumulative(parts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(parts)], dtype=torch.int32)


def owner(parts: list[int]) -> list[int]:
    return [i for i, n in enumerate(parts) for _ in range(n)]


@given(document_lengths)
def test_document_offsets(parts: list[int]) -> None:
    of, n = owner(parts), sum(parts)
    check(masks.document(offsets=cumulative(parts)), lambda b, h, q, kv: of[q] == of[kv], q_len=n, kv_len=n)


@given(document_lengths, st.randoms(use_true_random=False))
def test_document_offsets_of_keys_may_differ(parts: list[int], random: Any) -> None:
    keys = [random.randint(0, 5) for _ in parts]
    keys[-1] += 1
    of_q, of_kv = owner(parts), owner(keys)
    mask = masks.document(offsets=cumulative(parts), kv_offsets=cumulative(keys))
    check(mask, lambda b, h, q, kv: of_q[q] == of_kv[kv], q_len=len(of_q), kv_len=len(of_kv))


@given(lengths, lengths, st.integers(1, 6), st.none() | st.integers(1, 6))
def test_block_diagonal(q_len: int, kv_len: int, block: int, kv_block: int | None) -> None:
    rule = lambda b, h, q, kv: q // block == kv // (kv_block or block)  # noqa: E731
    check(masks.block_diagonal(block, kv_block), rule, q_len=q_len, kv_len=kv_len)


@given(lengths, lengths, st.integers(1, 6), st.none() | st.integers(0, 3))
def test_chunked(q_len: int, kv_len: int, size: int, left: int | None) -> None:
    def rule(b: int, h: int, q: int, kv: int) -> bool:
        begin = 0 if left is None else (q // size - left) * size
        return begin <= kv < (q // size + 1) * size

    check(masks.chunked(size, left), rule, q_len=q_len, kv_len=kv_len)


@given(lengths, lengths, widths, widths, st.integers(1, 5))
def test_dilated_window(q_len: int, kv_len: int, left: int, right: int, step: int) -> None:
    def rule(b: int, h: int, q: int, kv: int) -> bool:
        return kv in [*range(q, q - left - 1, -step), *range(q, q + right + 1, step)]

    check(masks.dilated_window((left, right), step), rule, q_len=q_len, kv_len=kv_len)


@pytest.mark.parametrize("sides", ["both", "keys", "queries"])
@pytest.mark.parametrize("form", ["count", "scalar", "marks", "marks by batch", "positions"])
def test_global_tokens(form: str, sides: str) -> None:
    n = 8
    chosen: list[set[int]] = [{0, 1, 2}, {0, 1, 2}]
    tokens: Any = 3
    if form == "scalar":
        tokens = Scalar(3)
    elif form == "positions":
        tokens, chosen = torch.tensor([5, 1]), [{1, 5}, {1, 5}]
    elif form.startswith("marks"):
        chosen = [{0, 7}, {3}] if form.endswith("batch") else [{2, 6}, {2, 6}]
        tokens = torch.tensor([[i in c for i in range(n)] for c in chosen])
        tokens = tokens if form.endswith("batch") else tokens[0]

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        return (sides != "keys" and q in chosen[b]) or (sides != "queries" and kv in chosen[b])

    check(masks.global_tokens(tokens, sides), rule, q_len=n, kv_len=n)


def test_padding() -> None:
    kv_lengths, q_lengths = torch.tensor([3, 7]), torch.tensor([5, 2])
    check(masks.padding(kv_lengths), lambda b, h, q, kv: kv < [3, 7][b], q_len=6, kv_len=8)
    rule = lambda b, h, q, kv: kv < [3, 7][b] and q < [5, 2][b]  # noqa: E731
    check(masks.padding(kv_lengths, q_lengths), rule, q_len=6, kv_len=8)
    real = torch.tensor([[False, True, True, False], [True, True, False, True]])
    check(masks.padding(real), lambda b, h, q, kv: bool(real[b, kv]), q_len=3, kv_len=4)


def natten_axis(i: int, n: int, k: int, d: int, causal: bool) -> set[int]:
    """What coordinate i sees on an axis: the k nearest of its own residue, found by sorting, not by a formula."""
    same = [j for j in range(n) if j % d == i % d]
    if causal:
        return set([j for j in same if j <= i][-k:])
    at = same.index(i)
    best = max(range(len(same) - k + 1), key=lambda s: (-abs(s + k // 2 - at), -s))
    return set(same[best : best + k])


@st.composite
def neighborhoods(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[bool]]:
    axes = draw(st.integers(1, 3))
    shape, kernel, dilation, causal = [], [], [], []
    for _ in range(axes):
        n = draw(st.integers(1, {1: 16, 2: 6, 3: 3}[axes]))
        d = draw(st.integers(1, n))
        shape.append(n)
        dilation.append(d)
        kernel.append(draw(st.integers(1, n // d)))
        causal.append(draw(st.booleans()))
    return shape, kernel, dilation, causal


@given(neighborhoods())
def test_neighborhood(case: tuple[list[int], list[int], list[int], list[bool]]) -> None:
    shape, kernel, dilation, causal = case
    grid = list(itertools.product(*map(range, shape)))

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        axes = zip(grid[q], grid[kv], shape, kernel, dilation, causal, strict=True)
        return all(j in natten_axis(i, n, k, d, c) for i, j, n, k, d, c in axes)

    mask = masks.neighborhood(shape, kernel, dilation, causal)
    check(mask, rule, batch=1, heads=1, q_len=len(grid), kv_len=len(grid))


@given(st.integers(3, 8), st.integers(3, 8), st.sampled_from([1, 3]))
def test_neighborhood_keeps_its_size_at_every_edge(rows: int, columns: int, kernel: int) -> None:
    n = rows * columns
    q, kv = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = masks.neighborhood((rows, columns), kernel)(0, 0, q, kv).expand(n, n).sum(1)
    assert (seen == kernel**2).all()


@given(document_lengths, st.booleans(), st.randoms(use_true_random=False))
def test_shared_prefix(parts: list[int], default: bool, random: Any) -> None:
    n, of = sum(parts), owner(parts)
    before = [0] * len(parts) if default else [random.randrange(len(parts)) for _ in parts]

    def rule(b: int, h: int, q: int, kv: int) -> bool:
        prefix = before[of[q]]
        return (of[q] == of[kv] and kv <= q) or (prefix != of[q] and of[kv] == prefix)

    mask = masks.shared_prefix(cumulative(parts), None if default else torch.tensor(before))
    check(mask, rule, q_len=n, kv_len=n)


REFUSED: dict[str, Callable[[], Any]] = {
    "causal with an unknown align": lambda: masks.causal("middle"),
    "window below 0": lambda: masks.sliding_window(-1),
    "window of a float": lambda: masks.sliding_window(2.5),  # type: ignore[arg-type]
    "window of a bool": lambda: masks.sliding_window(True),
    "window without an end": lambda: masks.sliding_window((None, None)),
    "window of three numbers": lambda: masks.sliding_window((1, 2, 3)),  # type: ignore[arg-type]
    "window by head in two dimensions": lambda: masks.sliding_window(torch.ones(2, 2, dtype=torch.int32)),
    "window of a float tensor": lambda: masks.sliding_window(torch.ones(2)),
    "window of a float scalar": lambda: masks.sliding_window(Scalar(2.0)),
    "prefix below 0": lambda: masks.prefix_lm(-3),
    "prefix of floats": lambda: masks.prefix_lm(torch.tensor([1.0])),
    "document of nothing": lambda: masks.document(),
    "document of both": lambda: masks.document(torch.arange(3), offsets=torch.tensor([0, 3])),
    "document of a list": lambda: masks.document([0, 1]),  # type: ignore[arg-type]
    "document of float ids": lambda: masks.document(torch.ones(3)),
    "document of 3-d ids": lambda: masks.document(torch.ones(1, 1, 3, dtype=torch.int32)),
    "ids with kv_offsets": lambda: masks.document(torch.arange(3), kv_offsets=torch.tensor([0, 3])),
    "offsets with kv_ids": lambda: masks.document(None, torch.arange(3), offsets=torch.tensor([0, 3])),
    "offsets that don't begin with 0": lambda: masks.document(offsets=torch.tensor([1, 3])),
    "offsets that fall": lambda: masks.document(offsets=torch.tensor([0, 3, 2])),
    "offsets beyond all sequences": lambda: masks.document(offsets=torch.tensor([0, 2**40])),
    "tokens beyond all sequences": lambda: masks.global_tokens(torch.tensor([3, 2**40])),
    "offsets of one number": lambda: masks.document(offsets=torch.tensor([0])),
    "offsets of no token": lambda: masks.document(offsets=torch.tensor([0, 0])),
    "offsets of other numbers of documents": lambda: masks.document(
        offsets=torch.tensor([0, 3]), kv_offsets=torch.tensor([0, 1, 3])
    ),
    "block of 0": lambda: masks.block_diagonal(0),
    "chunk of 0": lambda: masks.chunked(0),
    "chunks below 0": lambda: masks.chunked(4, left=-1),
    "dilation of 0": lambda: masks.dilated_window(4, 0),
    "global tokens below 0": lambda: masks.global_tokens(-1),
    "global positions below 0": lambda: masks.global_tokens(torch.tensor([-1, 2])),
    "global floats": lambda: masks.global_tokens(torch.ones(3)),
    "global sides unknown": lambda: masks.global_tokens(3, sides="left"),
    "padding of floats": lambda: masks.padding(torch.ones(2)),
    "padding of an int": lambda: masks.padding(3),  # type: ignore[arg-type]
    "padding of 1-d marks": lambda: masks.padding(torch.ones(2, dtype=torch.bool)),
    "neighborhood kernel beyond the axis": lambda: masks.neighborhood((4, 4), (5, 3)),
    "neighborhood dilation beyond the axis": lambda: masks.neighborhood((4, 4), 3, 2),
    "neighborhood of other axes": lambda: masks.neighborhood((4, 4), (3, 3, 3)),
    "neighborhood of four axes": lambda: masks.neighborhood((4, 4, 4, 4), 1),
    "neighborhood causal on other axes": lambda: masks.neighborhood((4, 4), 3, 1, (True,)),
    "shared prefix that names no document": lambda: masks.shared_prefix(torch.tensor([0, 2, 4]), torch.tensor([0, 2])),
    "shared prefix of another length": lambda: masks.shared_prefix(torch.tensor([0, 2, 4]), torch.tensor([0])),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises(errors.InvalidModArgument):
        REFUSED[case]()


def test_lengths_are_asked_for_where_they_matter() -> None:
    with pytest.raises(errors.UnknownLength, match="q_len="):
        masks.causal("bottom_right")(0, 0, 1, 1)
    assert bool(masks.causal("bottom_right")(0, 0, 1, 3, q_len=2, kv_len=4))
    assert not bool(masks.causal()(0, 0, 1, 3))


def test_captures_are_the_callers_own_tensors() -> None:
    from composattn.graph.expr import captures

    ids, lengths_ = torch.arange(4), torch.tensor([2])
    assert captures(masks.document(ids).expr)[0].tensor is ids
    assert captures(masks.padding(lengths_).expr)[0].tensor is lengths_
