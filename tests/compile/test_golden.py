"""Kernels of fixed plans are the recorded ones: what is meant to change no kernel changes none.

Who changes a kernel on purpose records it again, in the commit that does so, and the record says what became of it:

    python -m tests.compile.golden --check     which kernels differ, and in what
    python -m tests.compile.golden --update    writes golden.json
"""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.backends.fused.planning.plan import ForwardPlan
from composattn.backends.fused.planning.plan_backward import BackwardPlan
from composattn.backends.fused.running.emulated import text_of
from tests.compile.golden import (
    Kernel,
    Record,
    compiler,
    is_kept,
    is_traced_as_recorded,
    measured,
    ptx,
    seal,
    traced,
    traced_form,
)
from tests.compile.golden_plans import PLANS
from tests.plan_kinds import PLANS as KINDS

RECORD = Record.read()


def test_the_record_belongs_to_the_installed_language() -> None:
    assert not RECORD.refusal, RECORD.refusal


def test_all_plans_are_recorded_and_no_others() -> None:
    assert list(RECORD.kernels) == list(PLANS)
    assert len({k.sha256 for k in RECORD.kernels.values()}) == len(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_the_kernel_is_the_recorded_one(name: str) -> None:
    if RECORD.refusal:
        pytest.skip("golden.json belongs to another kernel language")  # the first test fails of that
    if not is_kept(name) and is_traced_as_recorded(name, RECORD):
        return
    text = ptx(name)
    if compiler(text) != RECORD.compiler:
        pytest.skip(f"the CUDA driver makes {compiler(text)} compile; golden.json belongs to {RECORD.compiler}")
    differences = list(measured(name, text).differences(RECORD.kernels[name]))
    assert not differences, "\n    ".join([f"{name}, against golden.json:", *differences])


@pytest.mark.parametrize("name", ["blackwell-forward", "blackwell-backward", "blackwell-backward-query-pair"])
def test_kernels_that_are_not_recorded_read_nothing_that_is_not_compared_either(name: str) -> None:
    (plan,) = (plan for plan in KINDS[name]() if isinstance(plan, (ForwardPlan, BackwardPlan)))
    assert "gpu.module" in traced_form(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORD.seals)
def test_an_equal_traced_form_makes_the_recorded_ptx(name: str) -> None:
    if not RECORD.refusal and is_traced_as_recorded(name, RECORD):
        text = ptx(name)
        assert compiler(text) != RECORD.compiler or measured(name, text) == RECORD.kernels[name]


def test_a_seal_holds_for_one_traced_form_and_one_record() -> None:
    name = "combine-d128"
    form, was = traced(name), RECORD.kernels[name]
    assert seal(form, was) == seal(traced(name), was) and "gpu.module" in form
    assert seal(form, dataclasses.replace(was, sha256="b")) != seal(form, was) != seal(form + " ", was)
    assert not is_traced_as_recorded(name, dataclasses.replace(RECORD, seals={}))


@pytest.mark.parametrize("name", ["combine-d128", "preprocess-d64"])
def test_names_of_kernels_have_the_word_that_their_machine_code_depends_on(name: str) -> None:
    """With no "cutlass" in it the loop of Blackwell's products has 226 instructions for 151, of the same PTX."""
    entry = re.search(r"\.entry\s+([\w$]+)", text_of(PLANS[name]()))
    assert entry is not None and re.fullmatch(r"composattn_\w+_cutlass_\d+", entry[1])


def test_a_difference_says_what_changed() -> None:
    was = Kernel(["head_dim=64", "listed=False"], "a", {"instructions": 90, "bar": 4})
    assert list(was.differences(was)) == []
    other = Kernel(["head_dim=64", "listed=True"], "b", {"instructions": 97, "bar": 4})
    assert list(other.differences(was)) == [
        "its plan: - listed=False",
        "its plan: + listed=True",
        "its PTX is another",
        "instructions: 97, was 90",
    ]
    assert list(dataclasses.replace(was, sha256="b").differences(was)) == ["its PTX is another, with equal counts"]


def test_a_record_of_another_language_refuses_by_name() -> None:
    assert "nvidia-cutlass-dsl 4.0" in dataclasses.replace(RECORD, language="4.0").refusal
