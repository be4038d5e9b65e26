"""How the harness calls a build of flash-attention 3, by an operator that stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import flash_attention_3
from benchmarks.cases import CASES, PatternFactory, causal, softcap, window
from benchmarks.implementations import FlashAttention3, Inputs, NotServed

CPU = torch.device("cpu")
KINDS = {"q": "Tensor", "k": "Tensor", "v": "Tensor", "out": "Optional[Tensor]", "softmax_scale": "Optional[float]"}
KINDS |= {"is_causal": "bool", "window_size_left": "int", "window_size_right": "int", "num_splits": "int"}
KINDS |= {"softcap": "float", "sm_margin": "int", "cp_world_size": "int"}
KINDS |= {f"cu_seqlens_{x}": "Optional[Tensor]" for x in "qk"} | {f"max_seqlen_{x}": "Optional[int]" for x in "qk"}


class Operator:
    """Takes arguments by name and keeps them; `softcap` has a default."""

    def __init__(self) -> None:
        made = [SimpleNamespace(name=name, type=kind, default_value=0.0) for name, kind in KINDS.items()]
        for argument in made:
            argument.has_default_value = lambda name=argument.name: name == "softcap"
        self.default = SimpleNamespace(_schema=SimpleNamespace(arguments=made))
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> tuple[torch.Tensor, None]:
        self.given = given
        return given["q"], None


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    made = Operator()
    monkeypatch.setenv("FA3_SO", "a library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=made), raising=False)
    flash_attention_3.operator.cache_clear()
    yield made
    flash_attention_3.operator.cache_clear()


def test_what_is_not_given_is_nothing_of_its_type(operator: Operator) -> None:
    q = torch.ones(2, 3, 4, 16)
    assert flash_attention_3.forward(q, q, q, is_causal=True).shape == q.shape
    assert operator.given.keys() == KINDS.keys()
    nothing = {name: operator.given[name] for name in ("out", "softcap", "sm_margin", "softmax_scale", "num_splits")}
    assert nothing == {"out": None, "softcap": 0.0, "sm_margin": 0, "softmax_scale": 0.25, "num_splits": 1}
    assert operator.given["cp_world_size"] == 1, "a build of November 2026 refuses 0"
    assert operator.given["q"].shape == (6, 4, 16), "a build of November 2026 takes packed sequences alone"
    assert operator.given["cu_seqlens_k"].tolist() == [0, 3, 6] and operator.given["max_seqlen_k"] == 3
    with pytest.raises(TypeError, match="no argument page"):
        flash_attention_3.forward(q, q, q, page=1)


def test_a_pattern_is_said_in_its_arguments(operator: Operator) -> None:
    case = next(case for case in CASES if case.name == "forward D128 S2048 causal")
    inputs = Inputs(*(torch.ones(1, 2, 5, 16) for _ in range(4)))
    said: dict[PatternFactory, dict[str, object]] = {
        causal: {"is_causal": True, "softcap": 0.0, "window_size_left": -1},
        softcap: {"is_causal": True, "softcap": 30.0, "window_size_left": -1},
        window: {"is_causal": False, "window_size_left": 1023, "window_size_right": 0},
    }
    for pattern, told in said.items():
        job = FlashAttention3().prepare(case, pattern(case, CPU), inputs)
        assert job.to_common(job.forward(*job.leaves)).shape == (1, 2, 5, 16)
        assert {name: operator.given[name] for name in told} == told


@pytest.mark.parametrize(
    "name", ["backward D128 S2048 causal", "forward D128 S8192 alibi", "forward D128 S8192 prefix"]
)
def test_what_it_has_no_argument_for_is_no_row_of_its(operator: Operator, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(NotServed):
        FlashAttention3().prepare(case, case.pattern(case, CPU), Inputs(*(torch.ones(1, 2, 5, 16) for _ in range(4))))
