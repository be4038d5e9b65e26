"""Bad lengths, pages and schedules are refused by their own named errors, and the message says what would work.

Forms are always checked; contents where `debug_checks` are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import composattn as ca
from composattn import errors
from composattn.mods import causal

BACKENDS = ["reference", "streaming"]


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CU = int32(0, 3, 3, 8)
"""Three sequences in 8 rows; the second is empty."""
META = CU.to("meta")
LAZY = torch.nn.UninitializedBuffer(dtype=torch.int32)


def rows(*totals: int, heads: tuple[int, int, int] = (4, 2, 2), dims: tuple[int, int, int] = (8, 8, 8)) -> list:
    return [torch.randn(n, h, d) for n, h, d in zip(totals or (8, 8, 8), heads, dims, strict=True)]


def packed(varlen: object = None, *tensors: torch.Tensor, **options: object) -> object:
    varlen = ca.Varlen(CU) if varlen is None else varlen
    return ca.attention(*(tensors or rows()), varlen=varlen, **options)  # type: ignore[arg-type]


TABLE = int32(0, 1, 2, 3, 4, 0).view(3, 2)
COUNTS = int32(20, 0, 32)


def cache(pages: int = 5, page_size: int = 16, heads: int = 2, dim: int = 8) -> torch.Tensor:
    return torch.randn(pages, heads, page_size, dim)


def q_dense(batch: int = 3, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(batch, 4, 1, 8, requires_grad=requires_grad)


def paged(
    table: torch.Tensor = TABLE,
    page_size: int = 16,
    counts: torch.Tensor = COUNTS,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    **options: object,
) -> object:
    tensors = (q_dense() if q is None else q, cache() if k is None else k, cache() if v is None else v)
    return ca.attention(*tensors, paged=ca.Paged(table, page_size, counts), **options)  # type: ignore[arg-type]


Case = tuple[type[errors.ComposattnError], Callable[[], object]]

VARLEN: dict[str, Case] = {
    "cu-seqlens-is-a-list": (errors.NotATensor, lambda: ca.Varlen([0, 3, 8])),
    "cu-seqlens-is-int64": (errors.UnsupportedIndexDType, lambda: ca.Varlen(CU.long())),
    "cu-seqlens-is-float": (errors.UnsupportedIndexDType, lambda: ca.Varlen(CU.float())),
    "cu-seqlens-k-is-int64": (errors.UnsupportedIndexDType, lambda: ca.Varlen(CU, CU.long())),
    "cu-seqlens-has-two-dimensions": (errors.WrongRank, lambda: ca.Varlen(CU.view(2, 2))),
    "cu-seqlens-has-no-sequence": (errors.ShapeMismatch, lambda: ca.Varlen(int32(0))),
    "cu-seqlens-is-strided": (errors.UnsupportedLayout, lambda: ca.Varlen(int32(0, 1, 2, 3, 4, 5)[::2])),
    "cu-seqlens-k-is-for-more-sequences": (errors.ShapeMismatch, lambda: ca.Varlen(CU, int32(0, 8))),
    "cu-seqlens-is-lazy": (errors.UnsupportedLayout, lambda: ca.Varlen(LAZY)),
    "a-page-table-that-is-lazy": (errors.UnsupportedLayout, lambda: ca.Paged(LAZY, 16, COUNTS)),
    "seqused-is-lazy": (errors.UnsupportedLayout, lambda: ca.Paged(TABLE, 16, LAZY)),
    "a-dropout-seed-that-is-lazy": (
        errors.UnsupportedLayout,
        lambda: packed(dropout_p=0.1, dropout_seed=torch.nn.UninitializedBuffer(dtype=torch.int64)),
    ),
    "cu-seqlens-k-lies-elsewhere": (errors.DeviceMismatch, lambda: ca.Varlen(CU, META)),
    "cu-seqlens-lies-elsewhere-than-q": (errors.DeviceMismatch, lambda: packed(ca.Varlen(META))),
    "seqused-has-no-entry-for-one": (errors.ShapeMismatch, lambda: ca.Varlen(CU, seqused_q=int32(1, 0))),
    "seqused-is-int64": (errors.UnsupportedIndexDType, lambda: ca.Varlen(CU, seqused_k=int32(1, 0, 2).long())),
    "seqused-has-two-dimensions": (errors.WrongRank, lambda: ca.Varlen(CU, seqused_k=int32(1, 0, 2).view(3, 1))),
    "max-seqlen-is-negative": (errors.InvalidLength, lambda: ca.Varlen(CU, max_seqlen_q=-1)),
    "max-seqlen-is-a-tensor": (errors.InvalidLength, lambda: ca.Varlen(CU, max_seqlen_k=torch.tensor(5))),
    "varlen-is-a-tensor": (errors.SequencesMismatch, lambda: packed(CU)),
    "q-has-four-dimensions": (errors.WrongRank, lambda: packed(None, *(x.unsqueeze(0) for x in rows()))),
    "k-has-four-dimensions": (errors.WrongRank, lambda: packed(None, rows()[0], rows()[1][None], rows()[2])),
    "packed-without-varlen": (errors.WrongRank, lambda: ca.attention(*rows())),
    "totals-differ-without-cu-seqlens-k": (errors.ShapeMismatch, lambda: packed(None, *rows(8, 9, 9))),
    "k-and-v-totals-differ": (errors.ShapeMismatch, lambda: packed(ca.Varlen(CU, CU), *rows(8, 8, 9))),
    "packed-head-dims-differ": (errors.ShapeMismatch, lambda: packed(None, *rows(dims=(8, 16, 8)))),
    "packed-heads-differ": (errors.ShapeMismatch, lambda: packed(None, *rows(heads=(4, 2, 4)))),
    "packed-group-does-not-divide": (errors.GroupMismatch, lambda: packed(None, *rows(heads=(3, 2, 2)))),
    "packed-without-heads": (errors.EmptyDimension, lambda: packed(None, *rows(heads=(0, 2, 2)))),
}

PAGED: dict[str, Case] = {
    "page-table-is-a-list": (errors.NotATensor, lambda: paged([[0, 1]])),
    "page-table-is-int64": (errors.UnsupportedIndexDType, lambda: paged(TABLE.long())),
    "page-table-has-one-dimension": (errors.WrongRank, lambda: paged(TABLE.view(-1))),
    "page-table-is-transposed": (errors.UnsupportedLayout, lambda: paged(TABLE.T, counts=int32(1, 1))),
    "page-table-is-empty": (errors.EmptyDimension, lambda: paged(TABLE[:, :0].contiguous())),
    "page-table-lies-elsewhere-than-seqused": (errors.DeviceMismatch, lambda: paged(TABLE.to("meta"))),
    "page-table-lies-elsewhere-than-q": (
        errors.DeviceMismatch,
        lambda: paged(TABLE.to("meta"), counts=COUNTS.to("meta")),
    ),
    "page-table-is-for-fewer-sequences": (errors.ShapeMismatch, lambda: paged(TABLE[:2], counts=COUNTS[:2])),
    "page-size-is-8": (errors.UnsupportedPageSize, lambda: paged(page_size=8)),
    "page-size-is-48": (errors.UnsupportedPageSize, lambda: paged(page_size=48)),
    "page-size-is-512": (errors.UnsupportedPageSize, lambda: paged(page_size=512)),
    "page-size-is-a-float": (errors.UnsupportedPageSize, lambda: paged(page_size=16.0)),  # type: ignore[arg-type]
    "page-size-is-not-that-of-k": (errors.SequencesMismatch, lambda: paged(page_size=32)),
    "cache-is-not-transposed": (
        errors.SequencesMismatch,
        lambda: paged(k=cache().transpose(1, 2), v=cache().transpose(1, 2)),
    ),
    "seqused-of-pages-is-missing": (errors.NotATensor, lambda: paged(counts=None)),  # type: ignore[arg-type]
    "seqused-of-pages-is-short": (errors.ShapeMismatch, lambda: paged(counts=COUNTS[:2])),
    "k-pages-are-packed": (errors.WrongRank, lambda: paged(k=rows()[1])),
    "k-and-v-pages-differ": (errors.ShapeMismatch, lambda: paged(v=cache(pages=6))),
    "k-and-v-page-sizes-differ": (errors.ShapeMismatch, lambda: paged(v=cache(page_size=32))),
    "cache-has-no-page": (errors.EmptyDimension, lambda: paged(k=cache(0), v=cache(0))),
    "packed-queries-without-varlen": (errors.WrongRank, lambda: paged(q=rows()[0])),
    "packed-queries-of-other-sequences": (
        errors.ShapeMismatch,
        lambda: paged(q=rows()[0], varlen=ca.Varlen(int32(0, 8))),
    ),
    "varlen-says-where-keys-in-pages-lie": (
        errors.SequencesMismatch,
        lambda: paged(q=rows()[0], varlen=ca.Varlen(CU, CU)),
    ),
    "paged-is-a-tensor": (errors.SequencesMismatch, lambda: ca.attention(q_dense(), cache(), cache(), paged=TABLE)),
    "paged-gradient": (errors.GradientUnsupported, lambda: paged(q=q_dense(requires_grad=True))),
    "paged-gradient-of-a-captured-tensor": (
        errors.GradientUnsupported,
        lambda: paged(score_mod=lambda s, b, h, q, kv: s * LEARNED[h]),
    ),
}
LEARNED = torch.ones(4, requires_grad=True)

SCHEDULE: dict[str, Case] = {
    "order-is-unknown": (errors.InvalidSchedule, lambda: ca.Schedule(order="largest_first")),
    "persistent-is-a-number": (errors.InvalidSchedule, lambda: ca.Schedule(persistent=1)),
    "heads-together-is-zero": (errors.InvalidSchedule, lambda: ca.Schedule(heads_together=0)),
    "heads-together-is-a-bool": (errors.InvalidSchedule, lambda: ca.Schedule(heads_together=True)),
    "split-kv-is-zero": (errors.InvalidSchedule, lambda: ca.Schedule(split_kv=0)),
    "split-kv-is-too-large": (errors.InvalidSchedule, lambda: ca.Schedule(split_kv=1000)),
    "split-kv-is-unknown": (errors.InvalidSchedule, lambda: ca.Schedule(split_kv="all")),
    "pack-gqa-is-text": (errors.InvalidSchedule, lambda: ca.Schedule(pack_gqa="yes")),
    "schedule-is-a-dict": (errors.InvalidSchedule, lambda: ca.Attention(schedule={"order": "auto"})),
}

CONTENTS: dict[str, Case] = {
    "cu-seqlens-falls": (errors.OffsetsNotMonotone, lambda: packed(ca.Varlen(int32(0, 5, 3, 8)))),
    "cu-seqlens-k-falls": (errors.OffsetsNotMonotone, lambda: packed(ca.Varlen(CU, int32(0, 5, 3, 8)))),
    "cu-seqlens-begins-late": (errors.OffsetsOutOfRange, lambda: packed(ca.Varlen(int32(1, 3, 3, 8)))),
    "cu-seqlens-is-negative": (errors.OffsetsOutOfRange, lambda: packed(ca.Varlen(int32(-1, 3, 3, 8)))),
    "cu-seqlens-ends-beyond-q": (errors.OffsetsOutOfRange, lambda: packed(ca.Varlen(int32(0, 3, 3, 9)))),
    "cu-seqlens-ends-before-q": (errors.OffsetsOutOfRange, lambda: packed(ca.Varlen(int32(0, 3, 3, 7)))),
    "cu-seqlens-k-ends-beyond-k": (errors.OffsetsOutOfRange, lambda: packed(ca.Varlen(CU, int32(0, 3, 3, 9)))),
    "seqused-is-longer-than-the-sequence": (
        errors.UsedOutOfRange,
        lambda: packed(ca.Varlen(CU, seqused_q=int32(3, 1, 2))),
    ),
    "seqused-is-negative": (errors.UsedOutOfRange, lambda: packed(ca.Varlen(CU, seqused_k=int32(3, -1, 2)))),
    "max-seqlen-is-too-small": (errors.MaximumExceeded, lambda: packed(ca.Varlen(CU, max_seqlen_q=4))),
    "max-seqlen-k-is-too-small": (errors.MaximumExceeded, lambda: packed(ca.Varlen(CU, CU, max_seqlen_k=4))),
    "page-beyond-the-cache": (errors.PageOutOfRange, lambda: paged(int32(0, 5, 2, 3, 4, 0).view(3, 2))),
    "page-is-negative": (errors.PageOutOfRange, lambda: paged(int32(0, -1, 2, 3, 4, 0).view(3, 2))),
    "seqused-is-longer-than-the-pages": (errors.UsedOutOfRange, lambda: paged(counts=int32(20, 0, 33))),
    "seqused-of-pages-is-negative": (errors.UsedOutOfRange, lambda: paged(counts=int32(20, -1, 32))),
}

FORMS = VARLEN | PAGED | SCHEDULE


@pytest.fixture(autouse=True)
def checks_are_as_they_were() -> Iterator[None]:
    with ca.debug_checks(False):
        yield


@pytest.mark.parametrize("kind", FORMS)
def test_a_bad_form_is_refused_by_name(kind: str) -> None:
    error, bad = FORMS[kind]
    with pytest.raises(error) as refusal:
        bad()
    assert type(refusal.value) is error
    assert len(str(refusal.value)) > 30, "the message must say what would work"


@pytest.mark.parametrize("kind", CONTENTS)
def test_bad_contents_are_refused_by_name_where_they_are_checked(kind: str) -> None:
    error, bad = CONTENTS[kind]
    with ca.debug_checks(), pytest.raises(error) as refusal:
        bad()
    assert type(refusal.value) is error
    assert any(character.isdigit() for character in str(refusal.value)), "the message must say where"


@pytest.mark.parametrize("backend", ["streaming", "reference"])
@pytest.mark.parametrize("kind", [k for k in CONTENTS if "page" in k])
def test_pages_that_are_not_there_are_named_where_the_host_reads_them_anyway(kind: str, backend: str) -> None:
    error, _ = CONTENTS[kind]
    bad = {
        "page-beyond-the-cache": {"table": int32(0, 5, 2, 3, 4, 0).view(3, 2)},
        "page-is-negative": {"table": int32(0, -1, 2, 3, 4, 0).view(3, 2)},
        "seqused-is-longer-than-the-pages": {"counts": int32(20, 0, 33)},
        "seqused-of-pages-is-negative": {"counts": int32(20, -1, 32)},
    }[kind]
    with pytest.raises(error):
        paged(**bad, backend=backend)


@pytest.mark.parametrize("backend", ["streaming", "reference"])
@pytest.mark.parametrize(
    ("error", "varlen"),
    [
        (errors.OffsetsNotMonotone, ca.Varlen(int32(0, 5, 3, 8))),
        (errors.OffsetsNotMonotone, ca.Varlen(CU, int32(0, 5, 3, 8))),
        (errors.OffsetsOutOfRange, ca.Varlen(int32(-1, 3, 3, 8))),
        (errors.OffsetsOutOfRange, ca.Varlen(int32(0, 3, 3, 9))),
        (errors.OffsetsOutOfRange, ca.Varlen(int32(0, 3, 3, 7))),
        (errors.OffsetsOutOfRange, ca.Varlen(int32(1, 3, 4, 8))),  # lengths, where their sums were meant
        (errors.OffsetsOutOfRange, ca.Varlen(CU, int32(0, 3, 3, 7))),
        (errors.UsedOutOfRange, ca.Varlen(CU, seqused_q=int32(3, 0, 7))),
        (errors.UsedOutOfRange, ca.Varlen(CU, seqused_k=int32(-1, 0, 1))),
    ],
)
def test_offsets_that_say_nothing_are_named_where_the_host_reads_them_anyway(
    error: type[Exception], varlen: ca.Varlen, backend: str
) -> None:
    with pytest.raises(error):
        packed(varlen, backend=backend)


def test_compiled_code_checks_contents_when_it_runs() -> None:
    attend = torch.compile(lambda q, k, v, varlen: ATTEND(q, k, v, varlen=varlen), fullgraph=True, backend="eager")
    too_low = ca.Varlen(CU, max_seqlen_q=4)
    attend(*rows(), too_low)
    with ca.debug_checks(), pytest.raises(errors.MaximumExceeded):
        attend(*rows(), too_low)
    with pytest.raises(errors.OffsetsOutOfRange):
        attend(*rows(), ca.Varlen(int32(1, 3, 3, 8)))


def test_compiled_code_checks_blocks_when_it_runs() -> None:
    picked = ca.BlockSparse.topk(torch.full((1, 1, 1, 1), 3), 16, 16, 16)
    blocks = ca.Attention(mask_mod=picked)
    attend = torch.compile(lambda q: blocks(q, q, q), fullgraph=True, backend="eager")
    attend(torch.ones(1, 1, 16, 8))
    with ca.debug_checks(), pytest.raises(errors.BlocksOutOfRange):
        attend(torch.ones(1, 1, 16, 8))


ATTEND = ca.Attention(mask_mod=causal())


@pytest.mark.parametrize("backend", BACKENDS)
def test_good_contents_pass_the_checks(backend: str) -> None:
    counts = int32(3, 0, 1)
    with ca.debug_checks():
        packed(ca.Varlen(CU), backend=backend)
        packed(ca.Varlen(CU, CU, seqused_q=counts, seqused_k=counts, max_seqlen_q=3, max_seqlen_k=3), backend=backend)
        paged(backend=backend)
        paged(int32(0, 1, -7, 99, 4, 0).view(3, 2), backend=backend)  # pages that no key lies in
        paged(q=rows()[0], varlen=ca.Varlen(CU), backend=backend)


def test_checks_are_off_until_asked_for_and_again_after() -> None:
    bad = ca.Varlen(CU, max_seqlen_q=4)
    packed(bad)
    with ca.debug_checks():
        with pytest.raises(errors.MaximumExceeded):
            packed(bad)
        with ca.debug_checks(False):
            packed(bad)
        with pytest.raises(errors.MaximumExceeded):
            packed(bad)
    packed(bad)
    ca.debug_checks(True)
    with pytest.raises(errors.MaximumExceeded):
        packed(bad)
    ca.debug_checks(False)
    packed(bad)


def test_schedules_are_values() -> None:
    assert ca.Schedule() == ca.Schedule(order="auto") and hash(ca.Schedule()) == hash(ca.Schedule(split_kv="auto"))
    assert ca.Schedule(split_kv=4) != ca.Schedule()
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    wanted = ca.attention(q, k, v)
    for asked in ({"order": "in_order"}, {"persistent": True, "heads_together": 2}, {"split_kv": 3, "pack_gqa": True}):
        schedule = ca.Schedule(**asked)
        assert torch.equal(ca.attention(q, k, v, schedule=schedule), wanted)


def test_refusals_are_the_built_in_errors_that_users_expect() -> None:
    assert issubclass(errors.UnsupportedIndexDType, TypeError)
    assert issubclass(errors.PageOutOfRange, IndexError)
    assert issubclass(errors.OffsetsNotMonotone, ValueError)
