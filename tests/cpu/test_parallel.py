"""Context parallel on CPUs: ranks are processes with gloo, and one device computes what they must agree with."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.analysis.drawing import PALE
from composattn.mods import causal, document, sliding_window
from composattn.parallel import context
from composattn.parallel.describe import describe
from composattn.parallel.division import divide
from composattn.parallel.exchange import Ranks
from composattn.parallel.merged import Merged
from composattn.parallel.movement import Movement
from composattn.parallel.traffic import TensorSizes, choose_traffic
from composattn.parallel.visits import grain_for, tile_for, visits_of
from tests import parallel_cases, parallel_memory, parallel_models, parallel_plans
from tests.ranks import on_ranks

SEED = int(os.environ.get("COMPOSATTN_TEST_SEED", "0")) * 1000
TOLERANCE = 1e-9  # of fp64


def assert_same(found: list[list[tuple[str, float, bool]]]) -> None:
    wrong = [
        (rank, *case) for rank, cases in enumerate(found) for case in cases if not (case[1] < TOLERANCE and case[2])
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("during", ["a call", "a backward"])
def test_bad_input_keeps_its_name_after_sequences_were_shared(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "left", [8])
    k = torch.zeros(1, 1, 8, 16)

    def call(*_: Any) -> None:
        with pytest.raises(ca.errors.NotATensor, match="q is a list"):
            ca.attention([1.0], k, k)  # type: ignore[arg-type]

    if during == "a call":
        call()
    else:
        x = torch.zeros(1, requires_grad=True)
        x.register_hook(call)
        x.sum().backward()


@pytest.mark.parametrize(("ranks", "count"), [(2, 12), (3, 12), (4, 6), (8, 3)])
def test_any_mask_on_several_ranks_is_what_one_device_computes(ranks: int, count: int) -> None:
    assert_same(on_ranks(ranks, parallel_cases.differences, list(range(SEED, SEED + count))))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_two_hundred_masks_on_several_ranks_are_what_one_device_computes(ranks: int) -> None:
    assert_same(on_ranks(ranks, parallel_cases.differences, list(range(SEED, SEED + 200)), seconds=550))


def test_what_a_user_does_works() -> None:
    for found in on_ranks(2, parallel_cases.usage):
        got, needed = found.pop("bytes")
        assert got <= 1.05 * needed
        assert {name for name, good in found.items() if not good} == set()


@pytest.mark.slow
def test_kernels_in_ranks_read_negated_views_as_torch_does() -> None:
    pytest.importorskip("cutlass", reason="kernels are compiled")
    assert on_ranks(2, parallel_cases.negated_in_kernels) == [[True] * 5] * 2


WAYS_OUT = {
    "mesh of no kind": "NoProcessGroup",
    "mesh of two dimensions": "MeshMismatch",
    "unknown dimension": "MeshMismatch",
    "method": "InvalidParallelOption",
    "parts": "InvalidParallelOption",
    "timeout": "InvalidParallelOption",
    "not planned": "NotPlanned",
    "indivisible": "IndivisibleSequence",
    "tile": "IndivisibleSequence",
    "no length": "InvalidParallelOption",
    "no attention": "InvalidParallelOption",
    "lengths differ": "RanksDisagree",
    "masks differ": "RanksDisagree",
    "documents differ": "CapturedTensorsDiffer",
    "captured on one rank": "CapturedTensorsDiffer",
    "gradient on one rank": "CapturedTensorsDiffer",
    "dtypes differ": "RanksDisagree",
    "options differ": "RanksDisagree",
    "shares of another shard": "WrongShare",
    "scatter of a share": "WrongShare",
    "gather of all": "WrongShare",
    "heads": "HeadsIndivisible",
    "pages": "UnsupportedInParallel",
    "varlen not planned": "UnsupportedInParallel",
    "transform": "UnsupportedInParallel",
    "twice differentiable": "GradientUnsupported",
}


def test_bad_input_ends_in_a_named_error_on_every_rank() -> None:
    for found in on_ranks(2, parallel_cases.refusals):
        assert found == WAYS_OUT


def test_a_rank_that_fails_ends_the_others_by_a_named_error_in_time() -> None:
    *others, _ = on_ranks(2, parallel_cases.one_leaves)
    assert [name for name, _ in others] == ["RankUnreachable"]
    assert all(seconds < 30 for _, seconds in others)  # the time-out is 2, the group's own 60


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda")])
def test_tensors_on_a_device_that_the_group_does_not_move_are_refused(backend: str, device: str) -> None:
    ranks = Ranks.__new__(Ranks)
    ranks.backend = backend
    with pytest.raises(ca.errors.WrongDeviceForGroup, match="init_device_mesh"):
        ranks.check_device(torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lighter", [14.0, 40.0])
def test_a_part_that_weighs_little_keeps_its_digits(lighter: float, dtype: torch.dtype) -> None:
    values = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    outs, lses = (values[0] * 2.0**40, values[1]), (torch.zeros(1, 2, 5), torch.full((1, 2, 5), lighter))
    weights = torch.stack(lses).double().softmax(0)
    exact = sum(w.unsqueeze(-1) * out.double() for w, out in zip(weights, outs, strict=True))
    for order in (0, 1), (1, 0):
        merged = Merged(values[0], 4, False)
        for i in order:
            merged.add(slice(0, 5), outs[i].clone(), lses[i].clone(), None)
        out, lse, _ = merged.result()
        torch.testing.assert_close(out.double(), exact, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=0.0)
        torch.testing.assert_close(lse, torch.stack(lses).logsumexp(0))


def test_without_a_process_group_there_is_no_context_parallel() -> None:
    with pytest.raises(ca.errors.NoProcessGroup, match="torchrun"):
        ca.ContextParallel(None)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mask", ["causal", "documents", "window", "full"])
def test_sixty_four_tiles_a_rank_are_balanced_and_windows_move_halos_only(mask: str, ranks: int) -> None:
    length = 64 * 128 * ranks
    ids = parallel_cases.documents_of(length, 40)
    masks = {
        "causal": causal(),
        "documents": causal() & document(ids),
        "window": causal() & sliding_window(512),
        "full": ca.mask(lambda b, h, q, kv: q >= 0),
    }
    tile = tile_for(length, ranks)
    visits = visits_of(masks[mask].expr, length, tile, grain_for(length, tile))
    division = divide(visits, ranks)
    assert division.imbalance <= 0.03
    assert all(division.owner.count(rank) == 64 for rank in range(ranks))
    if mask == "window":
        assert division.runs == ranks
        assert max(division.fetched) == 512


def test_who_computes_what_is_drawn(tmp_path: Path) -> None:
    visits = visits_of(causal().expr, 1024, 64, 16)
    division = divide(visits, 4)
    found = describe(division, visits.seen, choose_traffic("auto", None, division, visits.seen, TensorSizes(heads=4)))
    found.picture(tmp_path / "who.svg")
    drawn = (tmp_path / "who.svg").read_text()
    assert len(set(re.findall('<path d="M[^"]*" fill="(#[0-9a-f]*)"/>', drawn)) - {PALE}) == 4  # and heads of arrows
    assert [row.rows for row in found.rows] == [256] * 4
    assert "0.00%" in str(found)


def test_heads_are_shared_where_that_moves_less() -> None:
    visits = visits_of(causal().expr, 8192, 128, 64)
    division = divide(visits, 8)
    few, many = TensorSizes(heads=32, kv_heads=8), TensorSizes(heads=32, kv_heads=2)
    assert choose_traffic("auto", None, division, visits.seen, few).method == "heads"
    assert choose_traffic("auto", None, division, visits.seen, many).method != "heads"  # two heads are not eight ranks'
    assert choose_traffic("exchange", 2, division, visits.seen, few).received[0] == division.fetched[0] * few.kv_row


def test_each_row_that_a_mask_needs_is_fetched_and_hardly_any_other() -> None:
    length, ranks = 64 * 128 * 4, 4
    ids = parallel_cases.documents_of(length, 40)
    tile = tile_for(length, ranks)
    visits = visits_of((causal() & document(ids)).expr, length, tile, grain_for(length, tile))
    division = divide(visits, ranks)
    starts = torch.searchsorted(ids, ids)  # the first row of each row's document
    for rank in range(ranks):
        movement = Movement.of(division, visits.seen, rank, gather=False, parts=1)
        rows = movement.positions
        opened, closed = (torch.bincount(at, minlength=length + 1)[:length] for at in (starts[rows], rows + 1))
        needed = (opened - closed).cumsum(0) > 0  # by some row of the rank: from its document's start to itself
        needed[rows] = False
        assert int(needed.sum()) <= movement.fetched[rank] <= 1.05 * int(needed.sum())


def test_compiled_code_sees_one_operator() -> None:
    for apart, graphs in on_ranks(2, parallel_cases.compiled):
        assert apart < TOLERANCE
        assert graphs == 2  # a forward and a backward


@pytest.mark.parametrize("model", [parallel_models.fully_sharded, parallel_models.tensor_parallel])
def test_other_dimensions_of_the_mesh_shard_parameters_or_heads(model: Callable[..., Any]) -> None:
    for found in on_ranks(4, model):
        assert max(found.values()) < TOLERANCE, found


def test_activations_computed_again_divide_and_plan_nothing_again() -> None:
    for found in on_ranks(2, parallel_models.checkpointed):
        assert found.pop("divisions") == 1
        assert all(found.values()), found


def of_equal_tiles(tilings: Any) -> list[Any]:
    """Blocks that stay, or end with their tile, compute the same tiles, with more or less of V in registers."""
    forward, backward = tilings
    return [forward, dataclasses.replace(backward, persistent=False, resident=0)]


@pytest.mark.parametrize("window", [1024, 4096, None])
def test_a_rank_computes_in_the_tiles_of_one_gpu_and_no_more_of_them_than_its_share(window: int | None) -> None:
    length, ranks = 131072, 4
    mask = causal() if window is None else causal() & sliding_window(window)
    one = parallel_plans.planned(mask, length, length)
    tile = tile_for(length, ranks)
    visits = visits_of(mask.expr, length, tile, grain_for(length, tile))
    division = divide(visits, ranks)
    for rank in range(ranks):
        movement = Movement.of(division, visits.seen, rank, gather=False, parts=1)
        mine = [parallel_plans.of_call(mask, length, sub) for part in movement.parts for sub in part.sub_calls]
        assert all(of_equal_tiles(found.tilings) == of_equal_tiles(one.tilings) for found in mine)
        for executed in ("forward_tiles", "backward_tiles"):
            share = sum(getattr(found, executed) for found in mine) * ranks / getattr(one, executed)
            assert share < 1.02


@pytest.mark.parametrize("mask", ["documents", "window", "causal"])
def test_a_rank_holds_its_rows_and_those_that_it_fetches(mask: str) -> None:
    assert max(parallel_memory.over_rows(mask, rank, 4, 16384) for rank in range(4)) <= 1.15
