"""What runs again on tensors of one form gives what it would give anew, by the operations that hang on them alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import Operations
from composattn.analysis import rerun
from composattn.analysis.refreshed import no_caching
from composattn.analysis.rerun import Rerun
from composattn.analysis.tile_lists import Extent, KeyLists, QueryLists, TileLists
from composattn.mods import causal, document

CPU = torch.device("cpu")


def drawn(n: int) -> torch.Tensor:
    return torch.randint(0, 9, (n,))


def positions(inputs: Sequence[Any], offset: int = 0) -> list[torch.Tensor]:
    """Half of it speaks of positions alone."""
    x, y = inputs
    at = torch.arange(len(x)).flip(0) * 3 % 7 + offset
    low, order = torch.sort(x + at)
    return [low, torch.stack([order, at]).cumsum(0) if y is None else order + y]


def test_runs_follow_their_inputs() -> None:
    run = Rerun(positions)
    for offset in (0, 0, 0, 5, 5, 5):
        for y in (None, drawn(20)):
            for _ in range(3):
                x = drawn(20)
                for found, wanted in zip(run((x, y), (offset,)), positions((x, y), offset), strict=True):
                    assert torch.equal(found, wanted)


def test_from_the_third_run_on_only_what_hangs_on_the_inputs_is_dispatched() -> None:
    run, counts = Rerun(positions), []
    for _ in range(4):
        with Operations() as operations:
            run((drawn(20), None))
        counts.append(operations.counts)
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert not {"arange.default", "flip.default", "remainder.Scalar"} & set(counts[2])


def twice(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Runs that read and compare twice, also numbers that only look alike."""
    (x,) = inputs
    both = [x.detach().view(4, 5).amin(1) != n for n in (1, 1, 1.0)]
    return [both[0] | both[1], both[2] & (x.sum() > 0)]


def test_what_was_computed_before_is_not_computed_again() -> None:
    run, counts = Rerun(twice), []
    for _ in range(4):
        x = drawn(20)
        with Operations() as operations:
            found = run((x,))
        counts.append(operations.counts)
        assert all(map(torch.equal, found, twice((x,))))
    assert (counts[0]["amin.default"], counts[0]["ne.Scalar"]) == (3, 3)
    assert (counts[3]["amin.default"], counts[3]["ne.Scalar"]) == (1, 2)


def through_views(inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The whole of it four times, a part of it once."""
    (x,) = inputs
    whole = x.detach()[0:20].expand(20).view(20)
    return [whole + 1, whole[1:] * 2, whole.view(4, 5).amax(1)]


def test_views_of_the_whole_are_left_out_and_those_of_a_part_are_not() -> None:
    run = Rerun(through_views)
    for _ in range(4):
        x = drawn(20)
        with Operations() as operations, torch.no_grad():
            found = run((x,))
        assert all(map(torch.equal, found, through_views((x,))))
    assert operations.counts == {
        "add.Tensor": 1,
        "slice.Tensor": 1,
        "mul.Tensor": 1,
        "view.default": 1,
        "amax.default": 1,
    }


def twice_given_out(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x + 1, x + 1]


def views_given_out(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [(x + 1).view(4, 5), (x + 1).view(4, 5)]


@pytest.mark.parametrize("compute", [twice_given_out, views_given_out])
def test_what_is_given_out_shares_no_memory(compute: Any) -> None:
    run = Rerun(compute)
    for _ in range(4):
        one, other = run((drawn(20),))
        before = other.clone()
        one.add_(1)
        assert torch.equal(other, before)


def looks(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x + 1 if bool((x > 4).any()) else x - 1]


def writes_to_what_is_kept(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [torch.zeros(10, dtype=torch.int64).scatter_(0, x, 1)]


def gives_what_is_kept(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x + 1, torch.zeros(3)]


def views(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    y = x * 2
    y[::2].add_(1)
    return [y, y[1:]]


def counts(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x + (x > 2).nonzero().shape[0]]


def chooses(inputs: Sequence[Any]) -> list[torch.Tensor]:
    (x,) = inputs
    return [x + x[x > 2].shape[0]]


@pytest.mark.parametrize("compute", [looks, writes_to_what_is_kept, gives_what_is_kept, views, counts, chooses])
def test_what_can_be_recorded_no_further_is_computed_as_it_stands(compute: Any) -> None:
    run = Rerun(compute)
    for most in (9, 3, 9, 3, 9):
        x = torch.randint(0, most, (20,))
        found = run((x,))
        assert all(map(torch.equal, found, compute((x,))))
        for t in found:
            t.zero_()  # whoever got it may write to it


def test_runs_below_a_transform_are_not_recorded() -> None:
    run = Rerun(lambda inputs: [inputs[0] * 2])
    for _ in range(3):
        x = torch.randn(4, 3)
        assert torch.equal(torch.vmap(lambda row: run((row,))[0])(x), x * 2)


def test_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "MOST_HELD", 100)
    run = Rerun(positions)
    for _ in range(4):
        x = drawn(20)
        assert torch.equal(run((x, None))[0], positions((x, None))[0])
    assert run._known[1] is None


@pytest.mark.parametrize("kind", [KeyLists, QueryLists])
@pytest.mark.parametrize("lengths", [None, (300, 200)])
def test_lists_of_new_contents_are_those_of_a_fresh_mask(
    kind: type[TileLists], lengths: tuple[int, int] | None
) -> None:
    extent = Extent(300, 300, 2, 1, CPU, ragged=lengths is not None)
    places = (None, None if lengths is None else torch.tensor(lengths))

    def made(blocks: torch.Tensor, ids: torch.Tensor) -> TileLists:
        mask = ca.BlockSparse(blocks, 32, partial=causal() & document(ids)) & ca.mask(lambda b, h, q, kv: q - kv < 250)
        return kind(mask.expr, extent, (48, 80))

    blocks, ids = torch.randint(0, 3, (2, 1, 10, 10), dtype=torch.int8), torch.arange(300) // 40
    kept = made(blocks, ids)
    for _ in range(4):
        for found, wanted in zip(
            kept.of_call(queries=places, keys=places),
            made(blocks.clone(), ids.clone()).of_call(queries=places, keys=places),
            strict=True,
        ):
            assert torch.equal(found, wanted)
        blocks.copy_(torch.randint(0, 3, (2, 1, 10, 10)))
        ids.copy_(torch.randint(0, 9, (300,)).sort().values)
    assert kept._own.run._known[1] is not None


def test_lists_that_are_first_kept_in_inference_mode_are_written_to_outside_of_it() -> None:
    ids = torch.arange(300) // 40
    lists = KeyLists(document(ids).expr, Extent(300, 300, 1, 1, CPU), (48, 80))
    for _ in range(2):  # recorded, with nothing kept
        with no_caching():
            lists.of_call()
        ids.add_(1)
    with torch.inference_mode():
        lists.of_call()
    ids.copy_(torch.arange(300) // 70)
    fresh = KeyLists(document(ids.clone()).expr, Extent(300, 300, 1, 1, CPU), (48, 80))
    assert all(map(torch.equal, lists.of_call(), fresh.of_call()))


def test_a_recording_is_kept_for_its_own_form_whatever_other_threads_ask_meanwhile() -> None:
    inside, goes_on = threading.Event(), threading.Event()

    def compute(inputs: Sequence[Any], factor: float) -> list[torch.Tensor]:
        result = [inputs[0] * factor]
        if threading.current_thread() is recording:
            inside.set()
            assert goes_on.wait(10)
        return result

    run, x = Rerun(compute), torch.arange(4.0)
    recording = threading.Thread(target=lambda: run((x,), (2.0,)))
    run((x,), (2.0,))
    recording.start()
    assert inside.wait(10)
    run((x,), (3.0,))
    goes_on.set()
    recording.join()
    for factor in (3.0, 3.0, 2.0, -0.0, 0.0, 0.0):
        found = run((x,), (factor,))[0]
        assert torch.equal(found.signbit(), (x * factor).signbit()) and torch.equal(found, x * factor)


def test_a_run_of_no_inputs_gives_what_it_computes() -> None:
    run = Rerun(lambda inputs: [torch.arange(3)])
    for _ in range(4):
        assert torch.equal(run(())[0], torch.arange(3))
