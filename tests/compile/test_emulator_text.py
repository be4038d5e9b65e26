"""PTX with no machine code: the same text as a whole compilation makes, and none of what others compile meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.running import emulated
from composattn.backends.fused.running.emulated import captured, text_of
from composattn.emulator import text
from composattn.emulator.text import to_text
from tests.compile.golden_plans import PLANS
from tests.compile.test_architectures import combine


def made_in(folder: Path) -> set[str]:
    return {f.suffix for f in folder.rglob("kernel-*")}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_it_is_the_text_of_the_machine_code(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, pipelines = combine(arch), []
    monkeypatch.setattr(text, "to_text", lambda *given: pipelines.append(to_text(*given)) or pipelines[-1])
    found = text_of(plan, tmp_path)
    assert made_in(tmp_path) == {".ptx"} and "representation=ptx" in pipelines[0]
    assert compile_offline(plan, tmp_path).ptx == found == compile_offline(plan, tmp_path / "apart").ptx
    assert made_in(tmp_path) == {".ptx", ".cubin"}
    assert len(list((tmp_path / "apart").rglob("kernel-*"))) == 2


def test_who_compiles_meanwhile_gets_machine_code(tmp_path: Path) -> None:
    with text.no_machine_code(), ThreadPoolExecutor(1) as pool:
        made = pool.submit(compile_offline, combine("sm_90a"), tmp_path).result()
    assert made.cubin_path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("pipeline", "passes"),
    [
        ("builtin.module(cute-to-nvvm{opt-level=3})", "builtin.module(cute-to-core,gpu-to-binary{})"),
        ("builtin.module(another{opt-level=3})", "gpu.module(cuda-compute-target{as=sass}),cuda-to-binary{})"),
        ("builtin.module(cute-to-nvvm{})", "gpu.module(cuda-compute-target{as=ptx}),cuda-to-binary{})"),
    ],
)
def test_passes_of_another_form_are_left_as_they_are(pipeline: str, passes: str) -> None:
    assert to_text(pipeline, passes) == pipeline


def test_host_functions_used_last_are_kept_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "_kernels", {})
    monkeypatch.setattr(emulated, "KEPT", 2)
    plan = combine("sm_90a")
    first, other = captured(plan, tmp_path), captured(plan, tmp_path / "other")
    assert captured(plan, tmp_path) is first is not other and first.program is other.program
    third = captured(plan, tmp_path / "third")
    assert captured(plan, tmp_path) is first and captured(plan, tmp_path / "third") is third
    assert captured(plan, tmp_path / "other") is not other


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_ptxas_takes_what_is_recorded(name: str) -> None:
    assert compile_offline(PLANS[name]()).cubin_path.stat().st_size > 1000
