"""Documents by ids whose tiles begin with them, run by the emulator against fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlan, plan_backward
from composattn.backends.fused.running.emulated import emulating
from composattn.backends.fused.tiles import segments
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.mods.mask import Mask
from composattn.mods.masks import causal, document
from composattn.primitives.padded_tiles import PaddedTiles
from composattn.primitives.seqlen import DenseSequence
from composattn.primitives.tile_scheduler import Segment
from composattn.testing.tolerance import Case, assert_attention_close, check, run
from tests.support import cut_as_long_ones, on_few_sms, outlier_normal

BACKEND = "hopper-emulated"
ATTENTION = partial(ca.attention, backend=BACKEND)
NARROW = [pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 96)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sequences of some hundred rows are cut as long ones."""
    monkeypatch.setattr(segments, "LONG", 256)
    monkeypatch.setattr(segments, "MANY", 256)
    with cut_as_long_ones():
        yield


def documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def drawn(
    generator: torch.Generator,
    mask: Mask,
    batch: int,
    heads: tuple[int, int],
    length: int,
    order: str = "bhsd",
    dim: int = 128,
) -> Case:
    """`order`: of the dimensions in memory."""

    def rows(count: int) -> torch.Tensor:
        sizes = {"b": batch, "h": count, "s": length, "d": dim}
        shape = [sizes[name] for name in order]
        made = outlier_normal(*shape, generator=generator, dtype=torch.bfloat16)
        return made.permute(*(order.index(name) for name in "bhsd"))

    q, k, v = (rows(count) for count in (heads[0], heads[1], heads[1]))
    return Case(q, k, v, mask_mod=mask, name=mask.name)


@pytest.fixture
def few() -> Iterator[None]:
    """SMs, so that tiles do not all run at once."""
    with on_few_sms(BACKEND):
        yield


def in_segments(case: Case) -> bool:
    """Whether tiles begin with segments."""
    target = dataclasses.replace(HOPPER, sms=3)
    return plan_forward(Problem.of(case.q, case.k, case.v), case.program, target).has_segments


@pytest.mark.usefixtures("few")
def test_causal_documents_of_each_sequence_in_groups_of_heads(generator: torch.Generator) -> None:
    """Lengths that are no multiples of tiles, documents of one token, blocks that stay for several tiles."""
    ids = torch.stack([documents(150, 1, 1, 99, 146), documents(300, 97)])
    case = drawn(generator, causal() & document(ids), 2, (2, 1), 397)
    assert in_segments(case)
    check(ATTENTION, case)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dim", [64, pytest.param(96, marks=pytest.mark.slow), 192, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_small_blocks_and_large_ones_count_keys_from_a_document_on(
    is_causal: bool, dim: int, generator: torch.Generator
) -> None:
    """A first document that is too short for the copies of its last rows, short ones behind it, two in a segment."""
    ids = torch.stack([documents(70, 64, 100, 1, 62, 100), documents(300, 97)])
    mask = causal() & document(ids) if is_causal else document(ids)
    heads = (2, 1) if dim <= 128 else (2, 2)  # grouped heads of more columns share tiles, which begin with no document
    case = drawn(generator, mask, 2, heads, 397, dim=dim)
    assert in_segments(case)
    check(ATTENTION, case)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("order", ["bshd", "sbhd"])
def test_whole_documents_and_padding_that_sees_nothing(order: str, generator: torch.Generator) -> None:
    ids = torch.cat([documents(130, 201), torch.full((40,), -1)])
    seen = Mask.of(lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0))
    case = drawn(generator, seen, 1, (1, 1), 371, order)
    assert in_segments(case)
    check(ATTENTION, case)


@pytest.mark.usefixtures("few")
def test_a_short_document_behind_as_many_segments_as_there_may_be(generator: torch.Generator) -> None:
    """Its rows lay in no tile, and their output was what memory had held before."""
    ids = documents(*[128] * 8, 9)
    case = drawn(generator, causal() & document(ids), 1, (1, 1), len(ids))
    assert in_segments(case)
    check(ATTENTION, case)


@pytest.mark.usefixtures("few")
def test_ids_may_be_written_to_and_lie_anyhow(generator: torch.Generator) -> None:
    ids = documents(140, 130, 60)
    case = drawn(generator, causal() & document(ids), 1, (1, 1), 330)
    attention = ca.Attention(mask_mod=case.mask_mod, backend=BACKEND)

    def planned_once(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, **{name: value for name, value in options.items() if name == "return_lse"})

    for now in (ids.clone(), documents(140, 130, 60).roll(50), torch.arange(330), documents(200, 130)):
        ids.copy_(now)
        check(planned_once, case)
        check(ATTENTION, dataclasses.replace(case, mask_mod=causal() & document(ids)))


@pytest.mark.usefixtures("few")
def test_sinks_and_dropout(generator: torch.Generator) -> None:
    case = drawn(generator, document(documents(140, 130)), 1, (2, 1), 270)
    check(ATTENTION, dataclasses.replace(case, sinks=torch.randn(2, generator=generator).requires_grad_()))
    check(ATTENTION, dataclasses.replace(case, dropout=(0.2, 5)))


@pytest.mark.parametrize("tile", [64, 80, 128])
def test_each_segment_has_places_of_its_own_in_a_workspace(tile: int) -> None:
    rows = 597
    whole: Any = (0, rows)  # host numbers for those of a kernel
    for lengths in ((150, 1, 1, 199, 40, 206), (rows,), (128, 128, 128, 213), (129, 129, 129, 210), (300, 296, 1)):
        same = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
        begin, end = same.int().argmax(1), rows - same.flip(1).int().argmax(1)
        found = [(a, b) for a, b in segments.runs(begin[None], end[None])[0].tolist() if b > a]
        places: list[int] = []
        sequence: Any = DenseSequence(*whole)
        for number, (start, stop) in enumerate(found):
            row: Any = (start, stop, number)
            first = PaddedTiles.of(sequence.within(Segment(*row)), 0, tile).first
            places += range(first, first - (start - stop) // tile)
        assert len(set(places)) == len(places) and max(places) < segments.most_places(rows, tile)


# --- gradients ----------------------------------------------------------------------------------------------------


def with_gradients(case: Case, generator: torch.Generator) -> Case:
    dout = outlier_normal(*case.q.shape, generator=generator, dtype=torch.bfloat16)
    return dataclasses.replace(case, dout=dout, dlse=torch.randn(case.q.shape[:3], generator=generator))


def gradient_of(case: Case, in_order: bool = False) -> BackwardPlan[Any]:
    return plan_backward(Problem.of(case.q, case.k, case.v), case.program, HOPPER, deterministic=in_order).main


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "causal"])
def test_gradients_of_documents_of_each_sequence_in_groups_of_heads(
    is_causal: bool, generator: torch.Generator
) -> None:
    """Blocks that stay clear dQ of all sequences; keys of one warpgroup, and of both, that end with a document."""
    ids = torch.stack([documents(150, 1, 1, 190), documents(342), documents(175, 167)])
    mask = causal() & document(ids) if is_causal else document(ids)
    case = with_gradients(drawn(generator, mask, 3, (2, 1), 342), generator)
    plan = gradient_of(case)
    assert plan.has_segments and plan.tiling.persistent and plan.tiling.clears
    with on_few_sms(BACKEND):
        check(ATTENTION, case)


@pytest.mark.parametrize("mode", [EAGER, pytest.param(random_mode(1), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("dim", [*NARROW, 128])
def test_a_table_with_room_for_more_tiles_of_queries_than_documents_begin(
    dim: int, mode: Mode, generator: torch.Generator
) -> None:
    """Blocks that stay clear dQ and add to it by such a table, for grouped heads."""
    ids = torch.stack([documents(150, 1, 1, 110), documents(262)])
    case = with_gradients(drawn(generator, document(ids), 2, (4, 2), 262, dim=dim), generator)
    few = dataclasses.replace(HOPPER, sms=2)
    plan = plan_backward(Problem.of(case.q, case.k, case.v), case.program, few).main
    assert plan.has_segments and plan.tiling.persistent
    with emulating(mode), on_few_sms(BACKEND, 2):
        check(ATTENTION, case)


def test_pieces_by_query_heads_of_tiles_that_begin_with_documents(generator: torch.Generator) -> None:
    """Their sums go to the rows of a document alone, none of which lies beyond its end."""
    ids = documents(150, 1, 1, 110)
    case = with_gradients(drawn(generator, causal() & document(ids), 1, (4, 1), 262), generator)
    plan = gradient_of(case)
    assert plan.has_segments and plan.tiling.heads_a_piece == 2
    with on_few_sms(BACKEND, 2):
        check(ATTENTION, case)


def test_gradients_of_ids_that_are_written_to(generator: torch.Generator) -> None:
    """One cached plan serves them: also ids in any order, or that come again later, which make one segment."""
    ids = torch.stack([documents(150, 130), documents(280)])
    case = with_gradients(drawn(generator, causal() & document(ids), 2, (1, 1), 280), generator)
    attention = ca.Attention(mask_mod=case.mask_mod, backend=BACKEND)

    def planned_once(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, return_lse=options["return_lse"])

    for now in (ids.clone(), ids.flip(0), torch.stack([documents(130, 150), documents(150, 130).roll(40)])):
        ids.copy_(now)
        check(planned_once, case)


def test_a_backward_that_is_given_copies_goes_by_what_they_hold(generator: torch.Generator) -> None:
    """Hooks that keep saved tensors elsewhere give copies, while the ids hold the next batch's numbers."""
    ids = documents(150, 130)
    case = with_gradients(drawn(generator, causal() & document(ids), 1, (1, 1), 280), generator)
    then = ids.clone()

    def written_between(q: Any, k: Any, v: Any, **options: Any) -> Any:
        ids.copy_(then)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            out, lse = ATTENTION(q, k, v, **options)
        ids.copy_(documents(130, 150))
        return out, lse

    found = run(written_between, case)
    ids.copy_(then)
    assert_attention_close(found, case)


@pytest.mark.parametrize("mode", [LATE, random_mode(1)], ids=str)
def test_gradients_through_sinks_of_rows_that_lie_apart(mode: Mode, generator: torch.Generator) -> None:
    """Padding at the end sees nothing; shares of the sinks' gradient come by the table."""
    ids = torch.cat([documents(140, 131), torch.full((40,), -1)])
    seen = Mask.of(lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0))
    case = with_gradients(drawn(generator, seen, 1, (2, 1), 311, "sbhd"), generator)
    case = dataclasses.replace(case, sinks=torch.randn(2, generator=generator).requires_grad_())
    assert gradient_of(case).has_segments
    with emulating(mode), on_few_sms(BACKEND, 2):
        check(ATTENTION, case)


def test_gradients_with_dropout_keep_what_the_forward_kept(generator: torch.Generator) -> None:
    """Its words take the registers, and are of whole tiles: no tiles begin with segments."""
    case = with_gradients(drawn(generator, document(documents(140, 130)), 1, (2, 1), 270), generator)
    case = dataclasses.replace(case, dropout=(0.2, 5))
    assert not gradient_of(case).has_segments
    check(ATTENTION, case)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [*NARROW, 128])
def test_gradients_of_short_documents(is_causal: bool, dim: int, generator: torch.Generator) -> None:
    """Segments of less than a tile of keys; the first one has the rows that copies of its last ones need."""
    ids = torch.stack([documents(70, 64, 70, 1, 62), documents(200, 67)])
    mask = causal() & document(ids) if is_causal else document(ids)
    case = with_gradients(drawn(generator, mask, 2, (2, 1), 267, dim=dim), generator)
    assert gradient_of(case).has_segments
    with on_few_sms(BACKEND):
        check(ATTENTION, case)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", NARROW)
def test_gradients_of_narrow_heads(is_causal: bool, dim: int, generator: torch.Generator) -> None:
    ids = torch.stack([documents(150, 1, 1, 190), documents(175, 167)])
    mask = causal() & document(ids) if is_causal else document(ids)
    case = with_gradients(drawn(generator, mask, 2, (2, 1), 342, dim=dim), generator)
    assert gradient_of(case).has_segments
    with on_few_sms(BACKEND):
        check(ATTENTION, case)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [*NARROW, 128])
def test_gradients_in_a_fixed_order(is_causal: bool, dim: int, generator: torch.Generator) -> None:
    """A block asks the table what the tiles behind its own visit, of documents of several and of equal lengths."""
    ids = torch.stack([documents(150, 190, 150), documents(490)])
    mask = causal() & document(ids) if is_causal else document(ids)
    case = with_gradients(drawn(generator, mask, 2, (2, 1), 490, dim=dim), generator)
    plan = gradient_of(case, in_order=True)
    assert plan.has_segments and plan.metadata is not None
    for mode in (EAGER, LATE):
        with emulating(mode), on_few_sms(BACKEND):
            check(partial(ATTENTION, deterministic=True), case)


@pytest.mark.parametrize("dim", [*NARROW, 128])
def test_padding_that_sees_nothing_in_a_fixed_order(dim: int, generator: torch.Generator) -> None:
    """No tile of keys is known to visit each query, so dQ is cleared before: of 96 queries of D 96 as of others."""
    ids = torch.cat([documents(130, 201), torch.full((40,), -1)])
    seen = Mask.of(lambda b, h, q, kv: (ids[q] == ids[kv]) & (ids[q] >= 0))
    case = with_gradients(drawn(generator, seen, 1, (1, 1), 371, dim=dim), generator)
    plan = gradient_of(case, in_order=True)
    assert plan.has_segments and not plan.tiling.first_writes
    check(partial(ATTENTION, deterministic=True), case)


def test_pieces_by_query_heads_in_a_fixed_order(generator: torch.Generator) -> None:
    """No two pieces add to the same dQ; entries of the table that have no tile are no turn."""
    ids = documents(150, 1, 1, 190)
    case = with_gradients(drawn(generator, causal() & document(ids), 1, (4, 1), 342), generator)
    plan = gradient_of(case, in_order=True)
    assert plan.has_segments and plan.tiling.heads_a_piece == 2 and plan.tiling.persistent
    with emulating(random_mode(2)), on_few_sms(BACKEND, 2):
        check(partial(ATTENTION, deterministic=True), case)


def test_ids_that_are_written_to_in_a_fixed_order(generator: torch.Generator) -> None:
    """Ids that come again later make one segment, whose tiles visit queries of several documents."""
    ids = torch.stack([documents(150, 130), documents(280)])
    case = with_gradients(drawn(generator, causal() & document(ids), 2, (1, 1), 280), generator)
    attention = ca.Attention(mask_mod=case.mask_mod, backend=BACKEND, deterministic=True)

    def planned_once(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, return_lse=options["return_lse"])

    for now in (ids.flip(0), torch.stack([documents(130, 150), documents(150, 130).roll(40)])):
        ids.copy_(now)
        check(planned_once, case)


def test_the_same_bits_in_any_schedule(generator: torch.Generator) -> None:
    case = drawn(generator, causal() & document(documents(140, 201)), 1, (1, 1), 341)
    wanted = ca.attention(case.q, case.k, case.v, mask_mod=case.mask_mod, backend=BACKEND)
    for schedule in (ca.Schedule(order="shortest_first"), ca.Schedule(order="in_order", persistent=False)):
        found = ca.attention(case.q, case.k, case.v, mask_mod=case.mask_mod, backend=BACKEND, schedule=schedule)
        assert torch.equal(found, wanted)
