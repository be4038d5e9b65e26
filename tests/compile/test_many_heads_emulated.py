"""More heads or sequences than the second and third dimension of a grid take: here a limit of 1 stands for 65,535."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.planning import plan, plan_backward
from composattn.backends.fused.running import emulated
from composattn.emulator.findings import LaunchRefused
from composattn.emulator.launch import Result
from composattn.emulator.mode import Mode
from composattn.emulator.program import PtxProgram
from composattn.emulator.request import Launch
from composattn.mods import causal, document
from composattn.testing.tolerance import Case, check

attend = partial(ca.attention, backend="hopper-emulated")


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The grids of what is launched, none of which may have a second or third dimension."""
    found: list[tuple[int, int, int]] = []
    bind = Launch.bind

    def noted(self: Launch, program: object) -> None:
        found.append(self.grid)
        bind(self, program)  # type: ignore[arg-type]

    monkeypatch.setattr(Launch, "bind", noted)
    for module in (plan, plan_backward):
        monkeypatch.setattr(module, "MOST_ACROSS", 1)
    return found


def rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def test_gradients_of_many_heads_and_sequences(grids: list[tuple[int, int, int]], generator: torch.Generator) -> None:
    q, k, v, dout = (rows(generator, 2, heads, 70, 64) for heads in (2, 1, 1, 2))
    sinks = torch.randn(2, generator=generator).requires_grad_()
    check(attend, Case(q, k, v, mask_mod=causal(), dout=dout, sinks=sinks))
    assert len(grids) >= 4 and all(grid[1:] == (1, 1) for grid in grids)


@pytest.mark.slow
def test_gradients_of_many_heads_of_packed_sequences(
    grids: list[tuple[int, int, int]], generator: torch.Generator
) -> None:
    q, k, v, dout = (rows(generator, 200, heads, 64) for heads in (3, 1, 1, 3))
    varlen = ca.Varlen(torch.tensor([0, 90, 200], dtype=torch.int32))
    check(attend, Case(q, k, v, mask_mod=causal(), dout=dout, varlen=varlen))
    assert all(grid[1:] == (1, 1) for grid in grids)


def test_keys_in_parts_for_many_heads(grids: list[tuple[int, int, int]], generator: torch.Generator) -> None:
    q, k, v = rows(generator, 2, 3, 5, 64), rows(generator, 2, 3, 300, 64), rows(generator, 2, 3, 300, 64)
    check(partial(attend, schedule=ca.Schedule(split_kv=3)), Case(q, k, v))
    assert grids[-1] == (2 * 3 * 5, 1, 1) and all(grid[1:] == (1, 1) for grid in grids)


@pytest.mark.slow
def test_gradients_of_many_heads_of_documents(
    grids: list[tuple[int, int, int]], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fewest in ("LONG", "MANY"):
        monkeypatch.setattr(f"composattn.backends.fused.tiles.segments.{fewest}", 256)
    q, k, v, dout = (rows(generator, 1, 2, 400, 64) for _ in range(4))
    check(attend, Case(q, k, v, mask_mod=document(torch.arange(400) // 150), dout=dout))
    assert all(grid[1:] == (1, 1) for grid in grids)


def test_a_launch_that_no_device_takes_is_found(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """With heads in a grid's second dimension, and with more shared memory than a block gets."""
    run, refused = emulated._stream.run, []

    def asked(program: PtxProgram, given: Launch, mode: Mode) -> Result:
        beyond: dict[str, dict[str, Any]] = {
            "1, 65536, 1. blocks": {"grid": (1, 65536, 1)},
            "1, 1, 65536. blocks": {"grid": (1, 1, 65536)},
            "295936 bytes": {"dynamic_shared": 289 << 10},
        }
        for what, changed in beyond.items():
            with pytest.raises(LaunchRefused, match=what):
                run(program, dataclasses.replace(given, **changed), mode)
            refused.append(what)
        return run(program, given, mode)

    monkeypatch.setattr(emulated._stream, "run", asked)
    q = rows(generator, 1, 1, 64, 64)
    assert attend(q, q, q).isfinite().all() and len(refused) == 3
