"""Which GPU gets whose kernels, and how a plan that generates them is known."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import composattn as ca
from benchmarks.run import backend_as
from composattn import backends, errors, watched
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.architecture import ARCHITECTURES, planned_for
from composattn.backends.fused.tiles.target import HOPPER, TARGETS, Target
from composattn.call.problem import DENSE, Problem
from composattn.call.schedule import AUTO, Schedule
from composattn.mods import causal
from composattn.mods.mask import Mask

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[int, int]:
    """There seems to be a GPU of this compute capability."""
    major, minor = request.param
    facts = SimpleNamespace(name="a GPU", major=major, minor=minor, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: facts.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return major, minor


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ((9, 0), "hopper"),
        ((10, 0), "blackwell"),
        ((10, 3), "blackwell"),
        ((8, 0), "warp"),
        ((12, 0), "warp"),
        ((7, 5), "streaming"),
    ],
    indirect=["gpu"],
)
def test_a_gpu_gets_the_backend_of_its_capability(gpu: tuple[int, int], name: str) -> None:
    assert backends.default_for(GPU) == name


def picked(device: torch.device) -> str:
    """What `backend=None` takes there; that there is no such device shows only when a call is planned."""
    problem = Problem(1, 1, 1, 8, 8, 64, 64, torch.bfloat16, device)
    return backends.choose(None, problem).name


@pytest.mark.parametrize("gpu", [(10, 3), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)], indirect=True)
def test_kernels_that_never_ran_are_picked_with_one_warning_a_process(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends._say_if_never_run.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.warns(errors.NeverRanOnDevice) as said:
        assert picked(GPU) == picked(torch.device("cuda", 1)) == TARGETS[gpu].backend
    (warning,) = said
    name = f'backend="{TARGETS[gpu].backend}"'
    for words in ("never ran on such a device", "doctor --full", name, 'backend="streaming"'):
        assert words in str(warning.message)
    backends._say_if_never_run.cache_clear()


@pytest.mark.parametrize("gpu", [(9, 0), (10, 0), (8, 0), (7, 5)], indirect=True)
def test_who_names_a_backend_or_gets_one_that_ran_is_not_warned(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends._say_if_never_run.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    name = backends.default_for(GPU)
    problem = Problem(1, 1, 1, 8, 8, 64, 64, torch.bfloat16, GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(name, problem).name == name
        if gpu in ((9, 0), (7, 5)):
            assert picked(GPU) == name


@pytest.mark.parametrize("gpu", [(7, 5)], indirect=True)
def test_a_gpu_without_kernels_is_told_once(
    gpu: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_said", set())
    assert picked(GPU) == picked(torch.device("cuda", 1)) == "streaming"
    (said,) = caplog.messages
    assert "streaming" in said and "7.5" in said and "docs/gpus.md" in said


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_a_target_has_the_size_of_the_gpu_that_is_there(gpu: tuple[int, int]) -> None:
    assert Target.of(GPU) == dataclasses.replace(HOPPER, sms=7)


@pytest.mark.parametrize("gpu", [(7, 5), (10, 1)], indirect=True)
def test_a_gpu_that_no_machine_code_is_made_for_is_refused_with_those_that_are(gpu: tuple[int, int]) -> None:
    with pytest.raises(errors.BackendUnavailable, match=r"9\.0 \(sm_90a\), 10\.0 \(sm_100a\), 10\.3 \(sm_103a\)"):
        Target.of(GPU)


@pytest.mark.parametrize("gpu", [(9, 0), (10, 0)], indirect=True)
def test_kernels_of_warps_run_on_newer_gpus_if_they_are_asked_for(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert backends.BACKENDS["warp"].unavailable(GPU) is None
    target = ARCHITECTURES["warp"].target_on(GPU)
    assert (target.backend, target.arch, target.sms) == ("warp", TARGETS[gpu].arch, 7)
    assert target.shared_memory == TARGETS[8, 0].shared_memory


@pytest.fixture
def kept_architectures() -> Iterator[None]:
    """What a test says of them ends with it."""
    before = dict(ARCHITECTURES)
    yield
    ARCHITECTURES.update(before)


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_a_newer_gpu_runs_the_kernels_of_an_older_one_as_they_are_planned_there(
    gpu: tuple[int, int], kept_architectures: None
) -> None:
    problem = Problem(1, 2, 2, 4096, 4096, 256, 256, torch.bfloat16, GPU)
    for arch, keys in (("sm_80", 64), ("sm_86", 32)):
        name = backend_as(arch, GPU)
        target = ARCHITECTURES[name].target_on(GPU)
        assert (name, target.arch, target.sms) == ("warp", "sm_90a", 7)
        assert plan_forward(problem, Program(), target).tiling.tile_n == keys


@pytest.mark.parametrize(
    ("gpu", "arch", "why"),
    [
        ((9, 0), "sm_100a", "run on no GPU but those of blackwell; those of warp are built for newer ones too"),
        ((8, 9), "sm_80", "has warp's kernels for sm_89; leave --as out"),
        ((9, 0), "sm_90a", "run on no GPU but those of hopper"),
    ],
    indirect=["gpu"],
)
def test_kernels_that_run_on_no_other_gpu_are_not_timed_there(gpu: tuple[int, int], arch: str, why: str) -> None:
    with pytest.raises(errors.BackendUnavailable, match=why):
        backend_as(arch, GPU)


@pytest.mark.parametrize("gpu", [(7, 5)], indirect=True)
def test_kernels_of_warps_do_not_run_on_older_gpus(gpu: tuple[int, int]) -> None:
    why = backends.BACKENDS["warp"].unavailable(GPU)
    assert why is not None and "a GPU has compute capability 7.5" in why


@pytest.mark.parametrize("gpu", [(10, 0)], indirect=True)
def test_kernels_of_one_architecture_are_refused_on_a_gpu_of_another(gpu: tuple[int, int]) -> None:
    why = backends.BACKENDS["hopper"].unavailable(GPU)
    assert why is not None and "a GPU has compute capability 10.0" in why


def test_machine_code_runs_on_one_capability_alone() -> None:
    assert len({target.arch for target in TARGETS.values()}) == len(TARGETS)
    assert TARGETS[10, 3].exp2_per_clock == 2 * TARGETS[10, 0].exp2_per_clock


def test_every_architecture_is_a_backend_on_its_gpus_and_emulated() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert name == architecture.name == architecture.target.backend
        assert backends.BACKENDS[name].prepare_elsewhere is not None
        assert f"{name}-emulated" in backends.BACKENDS


@pytest.mark.parametrize("name", ["hopper", "hopper-emulated", "streaming", None])
def test_a_backend_plans_for_a_gpu_of_its_own_or_for_the_first_that_is_known(name: str | None) -> None:
    assert planned_for(name) is HOPPER


def test_a_backward_that_is_not_generated_is_refused_by_name_before_the_forward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All there are take what their forwards take; one that does not says so."""
    narrow = dataclasses.replace(ARCHITECTURES["blackwell"], max_gradient_dim=128)
    monkeypatch.setitem(ARCHITECTURES, "blackwell", narrow)
    q = torch.zeros(1, 1, 8, 192, dtype=torch.bfloat16, requires_grad=True)
    what = 'backend="blackwell" has gradients for D and Dv up to 128, got 192 and 192; use backend="streaming"'
    with pytest.raises(errors.GradientUnsupported, match=what):
        ca.attention(q, q, q, backend="blackwell-emulated")
    problem = Problem(1, 4, 2, 512, 512, 64, 136, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(errors.GradientUnsupported, match="got 64 and 136"):
        plan_backward(problem, Program(), TARGETS[10, 3])


def test_kernels_of_one_call_have_keys_of_their_own() -> None:
    problem = Problem(1, 4, 2, 4096, 512, 128, 128, torch.bfloat16, torch.device("cpu"), schedule=Schedule(split_kv=2))
    forward, gradient = plan_forward(problem, Program(), HOPPER), plan_backward(problem, Program(), HOPPER)
    assert gradient.gather is not None
    plans = [forward, forward.combine, gradient.preprocess, gradient.main, gradient.postprocess, gradient.gather]
    assert len({plan.key for plan in plans}) == len(plans)
    assert [plan.step for plan in plans] == [
        "forward", "combine", "preprocess", "backward", "postprocess", "backward_gather"
    ]  # fmt: skip


def test_the_kernels_before_and_behind_a_backward_do_not_change_with_how_keys_are_cut() -> None:
    whole, cut = (
        plan_backward(
            Problem(1, heads, heads, 1024, 1024, 128, 128, torch.bfloat16, torch.device("cpu")), Program(), HOPPER
        )
        for heads in (528, 4)  # 32 whole rounds of the SMs, and less than one
    )
    assert whole.gather is None and cut.gather is not None
    assert whole.main.key != cut.main.key
    assert (whole.preprocess.key, whole.postprocess.key) == (cut.preprocess.key, cut.postprocess.key)


def test_grouped_heads_in_a_fixed_order_come_one_at_a_time_and_in_the_last_section_fill_the_sms() -> None:
    """Hopper's backward, where a causal mask leaves tiles of keys different lengths and none is split."""

    def sections(
        heads: int, kv_heads: int, length: int, d: int = 128, deterministic: bool = True, schedule: Schedule = AUTO
    ) -> tuple[int | None, int | None]:
        shape = (8, heads, kv_heads, length, length, d, d, torch.bfloat16, torch.device("cpu"))
        problem = Problem(*shape, None, DENSE, schedule)
        program = Program(None, Mask.of(causal()).expr)
        tiling = plan_backward(problem, program, HOPPER, deterministic=deterministic).main.tiling
        return tiling.heads_together, tiling.heads_at_last

    assert sections(32, 8, 2048) == (1, 8) and sections(32, 8, 8192) == (1, 2) and sections(32, 8, 32768) == (1, 1)
    assert sections(16, 8, 8192, d=256) == (1, 1), "pairs of blocks have a tile"
    assert sections(32, 8, 2048, schedule=Schedule(heads_together=3)) == (3, 0)
    assert sections(16, 16, 2048)[1] == 0 and sections(32, 8, 2048, deterministic=False)[1] is None


def test_grouped_heads_whose_queries_outgrow_l2_come_few_at_a_time() -> None:
    """Hopper's backward: 8 heads of 8k queries are 67 MB of Q, dO and dQ."""

    def together(
        heads: int, kv_heads: int, length: int, deterministic: bool = False, schedule: Schedule = AUTO
    ) -> int | None:
        shape = (2, heads, kv_heads, length, length, 128, 128, torch.bfloat16, torch.device("cpu"))
        problem = Problem(*shape, None, DENSE, schedule)
        return plan_backward(problem, Program(), HOPPER, deterministic=deterministic).main.tiling.heads_together

    assert together(32, 4, 8192) == 2 and together(32, 4, 16384) == 1
    assert together(32, 4, 8192, deterministic=True) == 1
    assert together(32, 4, 8192, schedule=Schedule(heads_together=3)) == 3
    assert together(32, 4, 4096) is None, "these fit"
    assert together(16, 16, 65536) is None, "the tiles of one fill the machine"


def test_who_names_two_of_the_architectures_names_all() -> None:
    """A refusal that tells the owner of an RTX card to take "hopper" or "blackwell" sends him nowhere."""
    for path in Path(ca.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = {name for name in ARCHITECTURES if re.search(rf"['\"]{name}['\"]", node.value)}
                assert len(named) < 2 or named == ARCHITECTURES.keys(), f"{path}:{node.lineno}: {node.value}"
