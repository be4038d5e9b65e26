"""The kernels of `ca.quantize`, executed by the emulator: the bits that PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn import quantising
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.planning.plan_around import QuantisePlan
from composattn.backends.fused.running import quantise
from composattn.backends.fused.running.emulated import EmulatedKernel
from composattn.backends.fused.tiles.target import HOPPER, Target
from tests.support import outlier_normal

pytest.importorskip("cutlass")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16 = torch.bfloat16, torch.float16


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return outlier_normal(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class OnKernels:
    """Inside, `ca.quantize` of CPU tensors is the emulated kernels; `plans` are those that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[QuantisePlan] = []

        def served(tensors: Any, how: Any) -> Target | None:
            return HOPPER if quantise.serves(tensors[0], tensors[2], how) else None

        def rounded(*given: Any) -> Any:
            return quantise.rounded(*given, self.kernel_of)

        monkeypatch.setattr(quantising, "target_of", served)
        monkeypatch.setattr(quantising, "rounded", rounded)

    def kernel_of(self, plan: QuantisePlan) -> Any:
        self.plans.append(plan)
        return EmulatedKernel(plan)


def assert_same_bits(found: Any, wanted: Any) -> None:
    for name, x, y in zip("qkv", found, wanted, strict=True):
        assert x.data.dtype == y.data.dtype, name
        assert torch.equal(x.scale, y.scale), f"scales of {name}"
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8)), f"data of {name}"
        assert (x.mean is None) == (y.mean is None)
        assert x.rotated == y.rotated, name
    if wanted.k.mean is not None:
        assert torch.equal(found.k.mean, wanted.k.mean)


CASES: dict[str, tuple[dict[str, Any], tuple[int, int], torch.dtype]] = {
    "head": ({}, (128, 128), BF16),
    "head, e5m2, fp16": ({"dtype": E5M2, "center": False}, (96, 64), FP16),
    "block of 64": ({"scale": "block"}, (64, 64), BF16),
    "block of 16, best of 4": ({"scale": "block", "block": 16, "power_of_two": False}, (192, 128), BF16),
    "block of 128, best of 4": ({"scale": "block", "block": 128, "power_of_two": False}, (128, 128), BF16),
    "token": ({"scale": "token"}, (72, 40), BF16),
    "token, best of 4": ({"scale": "token", "power_of_two": False}, (128, 128), BF16),
    "token, e5m2, best of 4": ({"scale": "token", "power_of_two": False, "dtype": E5M2}, (64, 80), FP16),
    "token, D 256": ({"scale": "token", "hadamard": False}, (256, 256), BF16),
    "token, D 512": ({"scale": "token", "center": False}, (512, 512), BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_quantise_as_pytorch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how, (d, dv), dtype = CASES[name]
    q, k, v = (drawn(2, h, 70, x, seed=n, dtype=dtype) for n, (h, x) in enumerate(((3, d), (1, d), (1, dv))))
    k = k[:, :, :53] + 2  # as cross attention has it, and what all keys share
    v = v[:, :, :53] * 50
    v[0, 0, 3], v[1] = 0.0, 0.0
    wanted = ca.quantize(q, k, v, **how)
    on_kernels = OnKernels(monkeypatch)
    assert_same_bits(ca.quantize(q, k, v, **how), wanted)
    assert len(on_kernels.plans) == (2 if how.get("scale", "head") == "head" else 1)


@pytest.mark.parametrize("scale", ["head", "token"])
def test_packed_rows_and_strides_are_taken_as_they_are(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [drawn(75, 3, 64, seed=n)[:, :h] for n, h in enumerate((3, 1, 1))]
    turned = [drawn(1, 75, 3, 64, seed=n).transpose(1, 2) for n in range(3)]
    wanted = [ca.quantize(*given, scale=scale) for given in (packed, turned)]
    on_kernels = OnKernels(monkeypatch)
    for given, want in zip((packed, turned), wanted, strict=True):
        found = ca.quantize(*given, scale=scale)
        assert_same_bits(found, want)
    assert [x.data.stride() for x in found] == [x.stride() for x in turned]
    assert on_kernels.plans


def test_views_that_torch_negates_are_read_as_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [drawn(1, 1, 32, 64, seed=n) for n in range(3)]
    wanted = ca.quantize(*given, scale="token")
    on_kernels = OnKernels(monkeypatch)
    assert_same_bits(ca.quantize(*(torch._neg_view(-x) for x in given), scale="token"), wanted)
    assert on_kernels.plans


def test_pytorch_computes_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    on_kernels = OnKernels(monkeypatch)
    q, k, v = (drawn(1, 1, 32, 64, seed=n) for n in range(3))
    ca.quantize(q, k, v, power_of_two=False)
    ca.quantize(q, k, v, scale="block", block=8)
    ca.quantize(q, k, v, scale="block", block=512)
    ca.quantize(q.float(), k.float(), v.float(), scale="token")
    ca.quantize(*(drawn(1, 1, 32, 20, seed=n) for n in range(3)), scale="token")
    ca.quantize(*(x.clone().requires_grad_() for x in (q, k, v)), scale="token")
    assert not on_kernels.plans
    ca.quantize(q, k, v, scale="token")
    assert on_kernels.plans


@pytest.mark.parametrize("d", [128, 512])
def test_nothing_is_spilled(d: int) -> None:
    plan = QuantisePlan(
        target=HOPPER, dtype=BF16, head_dim=d, head_dim_v=d, to=E4M3, scale="block", rows=16384 // d, hadamard=True,
        center=True, power_of_two=False,
    )  # fmt: skip
    made = compile_offline(plan)
    assert made.stack == 0 and made.registers is not None and made.registers * plan.threads <= HOPPER.registers
