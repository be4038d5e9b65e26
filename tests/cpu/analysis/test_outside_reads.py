"""Reads outside of captured tensors: named on every backend where checks are on, at visible pairs and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.analysis.outside_reads import refuse_outside_reads
from composattn.analysis.program import Program
from composattn.mods import causal
from composattn.mods.mask import Mask
from composattn.mods.score import Score

LENGTH = 200
TABLE = torch.randn(LENGTH)
SHORT = torch.randn(2, LENGTH // 2)
IDS = torch.arange(LENGTH) // 10
RANGES = ((-2, 3), (-2, 3), (-30, 30), (60, 200), (55, 130))  # of coefficients, the modulus and the table's size
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def checks_are_on() -> Iterator[None]:
    with ca.debug_checks():
        yield


OUTSIDE: dict[str, dict[str, Callable[..., Any]]] = {
    "one further": {"score_mod": lambda s, b, h, q, kv: s + TABLE[q + 1]},
    "one before the first": {"score_mod": lambda s, b, h, q, kv: s + TABLE[-q - 2]},
    "by distance": {"score_mod": lambda s, b, h, q, kv: s + SHORT[h, (q - kv).abs()]},
    "by distance below the diagonal": {
        "score_mod": lambda s, b, h, q, kv: s + SHORT[h, q - kv],
        "mask_mod": causal(),
    },
    "by what another says": {"score_mod": lambda s, b, h, q, kv: s + SHORT[h, IDS[kv] * 6]},
    "in a mask": {"mask_mod": lambda b, h, q, kv: (TABLE[kv + 1] > -9) & (q >= kv)},
    "in a branch that is taken": {"score_mod": lambda s, b, h, q, kv: torch.where(q > 3, TABLE[q + 1], s)},
}
INSIDE: dict[str, dict[str, Callable[..., Any]]] = {
    "from the end": {"score_mod": lambda s, b, h, q, kv: s + TABLE[-q - 1] + TABLE[q - kv]},
    "hidden by the mask": {
        "score_mod": lambda s, b, h, q, kv: s + SHORT[h, q - kv],
        "mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv < LENGTH // 2),
    },
    "hidden by the mask that reads": {"mask_mod": lambda b, h, q, kv: (kv + 1 < LENGTH) & (TABLE[kv + 1] > 0)},
    "in a branch that is not taken": {
        "score_mod": lambda s, b, h, q, kv: torch.where(q + 1 < LENGTH, TABLE[q + 1], s) + TABLE[(q + 1).clamp(max=9)],
    },
    "blocks": {"mask_mod": ca.BlockSparse(torch.ones(1, 1, 13, 13, dtype=torch.bool), 16)},
}


def call(backend: str, **options: Any) -> Any:
    q = torch.randn(1, 2, LENGTH, 64, dtype=torch.float16 if "hopper" in backend else torch.float32)
    return ca.attention(q, q, q, backend=backend, **options)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "streaming") for name in OUTSIDE), ("one further", "hopper-emulated")]
)
def test_reads_outside_are_named_with_the_pair(name: str, backend: str) -> None:
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 0, h 0, q "):
        call(backend, **OUTSIDE[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_without_checks_they_are_clamped(name: str) -> None:
    with ca.debug_checks(False):
        assert bool(call("streaming", **OUTSIDE[name]).isfinite().all())


@pytest.mark.parametrize("name", INSIDE)
def test_reads_inside_pass(name: str) -> None:
    call("streaming", **INSIDE[name])


MASKS: list[Callable[..., Any] | None] = [
    None, causal(), lambda b, h, q, kv: (q - kv).abs() < 40, lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (h == 1)
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_is_named_is_what_a_look_at_every_pair_finds(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y, z, modulus, size = (int(torch.randint(low, high, (), generator=draw)) for low, high in RANGES)
    mask, table = MASKS[seed % len(MASKS)], torch.randn(size)

    def at(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (x * q + y * kv + z) % modulus - h * 7

    b, h, q, kv = torch.meshgrid(*map(torch.arange, (2, 2, LENGTH, LENGTH - 3)), indexing="ij")
    wrong = (at(b, h, q, kv) < -size) | (at(b, h, q, kv) >= size)
    wrong &= torch.ones(()).bool() if mask is None else mask(b, h, q, kv)
    score = Score.of(lambda s, b, h, q, kv: s + table[at(b, h, q, kv)])
    program = Program(score.expr, None if mask is None else Mask.of(mask).expr)
    if not wrong.any():
        refuse_outside_reads(program, range(2), 2, LENGTH, LENGTH - 3, CPU)
        return
    with pytest.raises(errors.CapturedIndexOutOfRange) as refusal:
        refuse_outside_reads(program, range(2), 2, LENGTH, LENGTH - 3, CPU)
    named = re.search(r"b (\d+), h (\d+), q (\d+), kv (\d+)", str(refusal.value))
    assert named is not None and bool(wrong[tuple(map(int, named.groups()))])


def test_packed_sequences_are_looked_at_one_by_one() -> None:
    rows = torch.randn(12, 2, 8)
    limits = torch.randn(2, 7)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    attend = ca.Attention(score_mod=lambda s, b, h, q, kv: s + limits[b, kv])
    attend(rows, rows, rows, varlen=ca.Varlen(offsets))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 1, h 0, q 0, kv 7"):
        attend(rows, rows, rows, varlen=ca.Varlen(torch.tensor([0, 4, 12], dtype=torch.int32)))


def test_pages_are_looked_at_as_far_as_they_are_used() -> None:
    q, pages = torch.randn(1, 1, 1, 8), torch.randn(2, 1, 16, 8)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    bias = torch.randn(20)
    attend = ca.Attention(score_mod=lambda s, b, h, q, kv: s + bias[kv])
    attend(q, pages, pages, paged=ca.Paged(table, 16, torch.tensor([20], dtype=torch.int32)))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="kv 20"):
        attend(q, pages, pages, paged=ca.Paged(table, 16, torch.tensor([21], dtype=torch.int32)))


def test_compiled_code_looks_when_it_runs() -> None:
    made = ca.Attention(score_mod=lambda s, b, h, q, kv: s + TABLE[q + 1])
    attend = torch.compile(lambda q: made(q, q, q), fullgraph=True, backend="eager")
    q = torch.randn(1, 1, LENGTH, 8)
    with pytest.raises(errors.CapturedIndexOutOfRange):
        attend(q)


# --- indices that a score decides --------------------------------------------------------------------------------

TEN = torch.randn(10)


def ones(score: float, *shape: int) -> torch.Tensor:
    """q and k of this shape, (..., D), all of whose scores with scale 1 are this one."""
    return torch.full(shape, (score / shape[-1]) ** 0.5)


def by_score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + TEN[(s * 4).round().long()]


def doubled(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s * 2


BY_SCORE: dict[str, tuple[float, dict[str, Callable[..., Any]]]] = {
    # name: (the first score in quarters that is outside, the mods)
    "by the score": (10, {"score_mod": by_score}),
    "by minus the score": (11, {"score_mod": lambda s, b, h, q, kv: s + TEN[(s * -4).round().long()]}),
    "by a score of an earlier mod": (5, {"score_mod": Score.of(doubled) >> by_score}),
    "by the score and the row": (8, {"score_mod": lambda s, b, h, q, kv: s + TEN[(s * 4).round().long() + q % 3]}),
    "by what a score reads": (4, {"score_mod": lambda s, b, h, q, kv: s + TEN[IDS[(s * 100).round().long()]]}),
    "in a branch by the score": (6, {"score_mod": lambda s, b, h, q, kv: torch.where(s > 1.3, TEN[q + 1], s)}),
    "below a mask": (10, {"score_mod": by_score, "mask_mod": causal()}),
}


@pytest.mark.parametrize("backend", ["streaming", "reference"])
@pytest.mark.parametrize("name", BY_SCORE)
def test_reads_by_the_score_are_named_where_they_leave_the_tensor(name: str, backend: str) -> None:
    first, mods = BY_SCORE[name]
    if "branch" not in name or backend != "reference":  # which looks at branches that are not taken, too
        x = ones((first - 1) / 4, 1, 2, 30, 8)
        ca.attention(x, x, x, scale=1.0, backend=backend, **mods)
    x = ones(first / 4, 1, 2, 30, 8)
    with pytest.raises(errors.CapturedIndexOutOfRange):
        ca.attention(x, x, x, scale=1.0, backend=backend, **mods)


def test_reads_by_the_score_are_named_before_a_kernel_runs() -> None:
    x = ones(2.5, 1, 1, 64, 64).half()
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 0, h 0, q 0, kv 0"):
        ca.attention(x, x, x, scale=1.0, backend="hopper-emulated", score_mod=by_score)


@pytest.mark.parametrize("seed", range(30))
def test_what_scores_decide_is_what_a_look_at_every_pair_finds(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    # whole numbers, whose products and sums no order rounds; more keys than a tile has
    q = torch.randint(-3, 4, (2, 4, 150, 8), generator=draw).to((torch.float32, torch.float64, torch.float16)[seed % 3])
    k = torch.randint(-3, 4, (2, 2, 170, 8), generator=draw).to(q.dtype)
    mask = (None, causal(), lambda b, h, q, kv: (q - kv).abs() < 20 * (b + 1), lambda b, h, q, kv: h == 3)[seed % 4]
    at = q.double() @ k.double().repeat_interleave(2, 1).mT
    b, h, i, j = torch.meshgrid(*map(torch.arange, at.shape), indexing="ij")
    visible = torch.ones_like(at, dtype=torch.bool) if mask is None else mask(b, h, i, j) & (b >= 0)
    largest = int(at[visible].abs().max())
    for size in (largest, largest + 1):
        table = torch.randn(size)
        attend = ca.Attention(score_mod=lambda s, b, h, q, kv, t=table: s + t[s.abs().long()], mask_mod=mask, scale=1.0)
        if size > largest:
            attend(q, k, k)
            return
        with pytest.raises(errors.CapturedIndexOutOfRange) as refusal:
            attend(q, k, k)
        named = re.search(r"b (\d+), h (\d+), q (\d+), kv (\d+)", str(refusal.value))
        assert named is not None
        pair = tuple(map(int, named.groups()))
        assert bool(visible[pair]) and abs(at[pair]) == largest


def test_hidden_scores_are_not_looked_at() -> None:
    x = ones(1.0, 1, 1, 300, 8)
    x[:, :, 200:] = torch.nan
    attend = ca.Attention(score_mod=by_score, mask_mod=lambda b, h, q, kv: (q < 200) & (kv < 200), scale=1.0)
    attend(x, x, x)
    with pytest.raises(errors.CapturedIndexOutOfRange, match="q 0, kv 150"):
        x[:, :, 150] *= 3
        attend(x, x, x)


def test_scores_of_packed_sequences_are_those_of_each() -> None:
    rows = ones(1.0, 12, 2, 8)
    rows[7, 1] *= 2  # the fifth of the second sequence: 4 with itself, 2 with others
    offsets = torch.tensor([0, 3, 12], dtype=torch.int32)
    attend = ca.Attention(score_mod=by_score, scale=1.0)
    used = torch.tensor([3, 4], dtype=torch.int32)
    attend(rows, rows, rows, varlen=ca.Varlen(offsets, seqused_q=used, seqused_k=used))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 1, h 1, q 4, kv 4"):
        attend(rows, rows, rows, varlen=ca.Varlen(offsets))


@pytest.mark.parametrize("packed", [False, True])
def test_scores_of_keys_in_pages_are_those_of_used_rows(packed: bool) -> None:
    q, pages = ones(1.0, 2, 1, 1, 8), ones(1.0, 4, 1, 16, 8)
    pages[2, :, 3] *= 3  # key 19 of the second sequence
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    attend = ca.Attention(score_mod=by_score, scale=1.0)
    varlen = None
    if packed:
        q, varlen = q.squeeze(2), ca.Varlen(torch.tensor([0, 1, 2], dtype=torch.int32))
    attend(q, pages, pages, varlen=varlen, paged=ca.Paged(table, 16, torch.tensor([32, 19], dtype=torch.int32)))
    with pytest.raises(errors.CapturedIndexOutOfRange, match="b 1, h 0, q 0, kv 19"):
        attend(q, pages, pages, varlen=varlen, paged=ca.Paged(table, 16, torch.tensor([32, 20], dtype=torch.int32)))


WAYS: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "training": lambda f: f,
    "compiled": lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
    "vmap": lambda f: lambda x: torch.vmap(f)(x[None]),
    "grad": lambda f: lambda x: torch.func.grad(lambda y: f(y).sum())(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_scores_are_looked_at_however_a_call_is_made(way: str) -> None:
    made = ca.Attention(score_mod=by_score, scale=1.0)
    attend = WAYS[way](lambda x: made(x, x, x))
    x = ones(2.25, 1, 1, 30, 8).requires_grad_()
    attend(x).sum().backward()
    with pytest.raises(errors.CapturedIndexOutOfRange, match="q 0, kv 0"):
        attend(x.detach() * 1.1)


def test_below_autocast_scores_are_not_rounded_to_its_type() -> None:
    q, k = torch.ones(1, 1, 3, 8), torch.tensor([37.0] * 7 + [0.0]).expand(1, 1, 3, 8)  # 259, in bfloat16 260
    for size in (260, 259):
        table = torch.randn(size)
        with torch.autocast("cpu", torch.bfloat16):
            attend = ca.Attention(score_mod=lambda s, b, h, q, kv, t=table: s + t[s.long()], scale=1.0)
            if size == 260:
                attend(q, k, k)
                continue
            with pytest.raises(errors.CapturedIndexOutOfRange):
                attend(q, k, k)
