"""Kernels on disk, with the real compiler: the key has what compiling reaches, damage is noticed, loading is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.compiling import compile as compiling
from composattn.backends.fused.compiling.compile import compile_ahead, compile_offline, compile_plan
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem

ROOT = Path(__file__).parents[2]

# the smallest of a backward's three kernels: half a second
PLAN = (
    "import sys, torch, composattn as ca; from composattn.backends.fused.planning.plan_backward import plan_backward;"
    "from composattn.call.problem import Problem;"
    "from composattn.backends.fused.tiles.target import HOPPER; q = torch.empty(1, 1, 64, 64, dtype=torch.float16);"
    "attn = ca.Attention(); plan = plan_backward(Problem.of(q, q, q), attn.program, HOPPER).preprocess;"
)


def plan() -> Any:
    q = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    attn = ca.Attention()
    return plan_backward(Problem.of(q, q, q), attn.program, HOPPER).preprocess


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PLAN + code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COMPOSATTN_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


def test_a_kept_kernel_is_loaded_without_the_kernel_language(tmp_path: Path) -> None:
    code = (
        "from composattn.backends.fused.compiling import compile; compile.compile_plan(plan);"
        "print('cutlass' in sys.modules)"
    )
    assert [run(code, tmp_path / "kernels") for _ in range(2)] == ["True", "False"]


def test_what_was_compiled_ahead_is_loaded_with_no_compiler_and_is_the_code_beside_it(tmp_path: Path) -> None:
    compile_ahead(plan(), tmp_path / "kernels")
    library, cubin = (next((tmp_path / "kernels").rglob(f"kernel-*{suffix}")) for suffix in (".so", ".cubin"))
    assert cubin.read_bytes() in library.read_bytes()
    later = (
        "from composattn.backends.fused.compiling import compile; compile._run_compiler = None;"
        "print(compile.compile_plan(plan) is not None, 'cutlass' in sys.modules)"
    )
    assert run(later, tmp_path / "kernels") == "True False"


def test_compiling_reaches_nothing_that_the_key_leaves_out(tmp_path: Path) -> None:
    code = (
        "from composattn.backends.fused.compiling.compile import compile_plan;"
        "from composattn.backends.fused.compiling import toolchain;"
        "[compile_plan(p) for p in (plan, plan_backward(Problem.of(q, q, q), attn.program, HOPPER).main)];"
        "files = {m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'composattn'};"
        "print(sorted(files - {str(p) for p in toolchain.sources()}))"
    )
    assert run(code, tmp_path) == "[]"


@pytest.mark.parametrize("linker", [True, False], ids=["library", "object_file"])
def test_a_kernel_with_flipped_bytes_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linker: bool
) -> None:
    monkeypatch.setenv("COMPOSATTN_CACHE_DIR", str(tmp_path / "kernels"))
    if not linker:
        monkeypatch.setattr(compiling, "_linked", lambda made: None)

    def of_new_process() -> Any:
        monkeypatch.setattr(compiling, "_compiled", {})
        return compile_plan(plan())

    def refuses_nothing() -> None:  # a kernel that is there says what it wants
        with pytest.raises(TypeError, match="Expects"):
            of_new_process()()

    refuses_nothing()
    (kept,) = (tmp_path / "kernels").rglob("kernel-*")
    assert kept.suffix == (".so" if linker else ".o")
    whole = kept.read_bytes()
    kept.unlink()  # the old file stays mapped: it is replaced, not written to
    kept.write_bytes(whole[:-1000] + bytes(b ^ 1 for b in whole[-1000:]))
    with pytest.warns(UserWarning, match="is damaged"):
        refuses_nothing()
    refuses_nothing()


def test_ptx_with_a_flipped_byte_is_compiled_again(tmp_path: Path) -> None:
    text = compile_offline(plan(), tmp_path).ptx_path.read_text()
    (kept,) = tmp_path.rglob("*.ptx")
    kept.write_text(text.replace("add.f32", "sub.f32", 1))
    with pytest.warns(UserWarning, match="is damaged"):
        assert compile_offline(plan(), tmp_path).ptx_path.read_text() == text
