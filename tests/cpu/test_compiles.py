"""When kernels are compiled: at their first launch, and none that is not launched; counted with a stand-in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import backends
from composattn.backends.fused.compiling.compile import _run_compiler, uncollected
from composattn.backends.fused.running.call import FusedCall
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.inputs import Inputs
from composattn.mods import alibi, causal


class Compiled(list[Any]):
    """The plans that kernels were compiled of; Hopper's with no GPU, kernels that do nothing."""

    def __call__(self, plan: Any) -> Any:
        self.append(plan)
        return lambda *arguments: None

    @property
    def steps(self) -> list[str]:
        return [plan.step for plan in self]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled()
    hopper = SimpleNamespace(prepare=lambda problem, program, scale: FusedCall(problem, program, scale, HOPPER, made))
    monkeypatch.setattr(backends, "choose", lambda name, problem: hopper)
    return made


def inputs(q_len: int = 256, kv_len: int = 256, grad: bool = False) -> list[torch.Tensor]:
    return [torch.zeros(1, 2, n, 64, dtype=torch.bfloat16, requires_grad=grad) for n in (q_len, kv_len, kv_len)]


def test_planning_compiles_nothing(compiled: Compiled) -> None:
    attn = ca.Attention(mask_mod=causal())
    attn.prepared(Inputs(*inputs()))
    assert compiled.steps == []


def test_explaining_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(*arguments: Any) -> Any:
        raise AssertionError("explain compiles")

    monkeypatch.setattr("composattn.backends.fused.compiling.compile._run_compiler", compiles)
    monkeypatch.setattr("composattn.backends.fused.compiling.disk_cache.get", compiles)
    text = str(ca.Attention(mask_mod=causal(), score_mod=alibi(2), backend="hopper").explain(*inputs()))
    assert "plan" in text


def test_no_garbage_is_looked_for_while_a_kernel_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

    class Traced(Exception):
        pass

    def traces(plan: Any) -> Any:
        raise Traced(gc.isenabled())

    monkeypatch.setattr("composattn.backends.fused.compiling.compile.kernel_of", traces)
    plan: Any = SimpleNamespace(target=HOPPER)
    with pytest.raises(Traced, match="False"):
        _run_compiler(plan)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(Traced):
            _run_compiler(plan)
        assert not gc.isenabled()  # as it was before
    finally:
        gc.enable()


@pytest.fixture
def thawed() -> Iterator[None]:
    """No object is frozen, as in most processes; the tests' own has some."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_compilation_made_is_old_behind_it(thawed: None) -> None:
    gc.collect()
    with uncollected():
        made: list[Any] = [[] for _ in range(5000)]
    young = {id(thing) for generation in (0, 1) for thing in gc.get_objects(generation)}
    assert gc.isenabled() and not any(id(thing) in young for thing in made)
    made.append(made)
    del made
    assert gc.collect() > 5000  # found like any other garbage


def test_what_somebody_froze_stays_so_behind_a_compilation(thawed: None) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert 0 < gc.get_freeze_count() <= frozen  # some may end meanwhile; thawed there would be none


def test_inference_compiles_the_forward_without_lse(compiled: Compiled) -> None:
    attn = ca.Attention(mask_mod=causal())
    for _ in range(2):
        attn(*inputs())
    assert [(plan.step, plan.return_lse) for plan in compiled] == [("forward", False)]


def test_training_compiles_what_it_launches(compiled: Compiled) -> None:
    attn = ca.Attention(mask_mod=causal())
    for _ in range(2):
        q, k, v = inputs(grad=True)
        attn(q, k, v).sum().backward()
    assert compiled.steps == ["forward", "preprocess", "backward", "postprocess"]
    assert compiled[0].return_lse


def test_a_forward_alone_compiles_no_backward(compiled: Compiled) -> None:
    attn = ca.Attention(mask_mod=causal())
    attn(*inputs(grad=True))
    assert compiled.steps == ["forward"]


def test_splitting_kv_compiles_the_kernel_that_combines(compiled: Compiled) -> None:
    attn = ca.Attention()
    attn(*inputs(q_len=1, kv_len=8192))
    assert compiled.steps == ["forward", "combine"]


@pytest.mark.parametrize("in_order", [False, True], ids=["any-order", "in-order"])
@pytest.mark.parametrize("q_len, kv_len", [(0, 256), (256, 0)])
def test_an_empty_call_compiles_nothing(compiled: Compiled, q_len: int, kv_len: int, in_order: bool) -> None:
    attn = ca.Attention(mask_mod=causal(), deterministic=in_order)
    q, k, v = inputs(q_len, kv_len, grad=True)
    attn(q, k, v).sum().backward()
    assert compiled.steps == []
