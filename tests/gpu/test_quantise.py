"""`ca.quantize` on a GPU: the bits that PyTorch computes on the same device, from one kernel or two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import composattn as ca
from composattn import quantising
from composattn.backends.fused.running.quantise import target_of
from composattn.call.eight_bits import Rounding
from tests.support import outlier_normal

E4M3 = torch.float8_e4m3fn
PLAIN: dict[str, Any] = {
    "scale": "head", "block": 64, "hadamard": True, "center": True, "power_of_two": True, "dtype": E4M3,
}  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {
    "head": {},
    "head, e5m2": {"dtype": torch.float8_e5m2, "center": False},
    "block": {"scale": "block"},
    "block of 128, best of 4": {"scale": "block", "block": 128, "power_of_two": False},
    "token": {"scale": "token", "hadamard": False},
    "token, best of 4": {"scale": "token", "power_of_two": False},
}


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_has_the_bits_of_pytorch(way: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if "128" in way and max(dims) > 128:
        pytest.skip("more rows than a block has registers for: PyTorch computes it")
    generator = torch.Generator().manual_seed(0)
    given = [
        outlier_normal(2, heads, 1000, d, generator=generator, dtype=torch.bfloat16).cuda()
        for heads, d in ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    ]
    how = Rounding(**{**PLAIN, **WAYS[way]})
    assert target_of((given[0], given[1], given[2]), how) is not None
    found = ca.quantize(*given, **WAYS[way])
    monkeypatch.setattr(quantising, "target_of", lambda *_: None)
    wanted = ca.quantize(*given, **WAYS[way])
    for name, x, y in zip("qkv", found, wanted, strict=True):
        assert x.scale is not None and y.scale is not None
        other = torch.ne(x.scale, y.scale)  # near ties of the best of 4: sums come in another order
        assert float(other.float().mean()) < (1e-3 if "best" in way else 1e-30), name
        near = (x.dequantised() - y.dequantised()).abs() <= 0.13 * y.dequantised().abs() + 0.13 * y.scale.amax()
        assert bool(near.all()), name
        assert float((x.data.view(torch.uint8) != y.data.view(torch.uint8)).float().mean()) < 2e-3, name
    assert (found.k.mean is None) == (wanted.k.mean is None)
    if found.k.mean is not None:
        torch.testing.assert_close(found.k.mean, wanted.k.mean, rtol=1e-6, atol=1e-6)


def test_packed_rows_and_another_stream_are_as_any() -> None:
    q, k, v = (torch.randn(700, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    wanted = ca.quantize(q, k, v, scale="token")
    with torch.cuda.stream(torch.cuda.Stream()):
        found = ca.quantize(q, k, v, scale="token")
    torch.cuda.synchronize()
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8)) and torch.equal(x.scale, y.scale)
