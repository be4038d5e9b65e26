"""Gradients of captured reads land where they were read from, whatever the pattern, in one order."""

from __future__ import annotations

import pytest
import torch

from composattn.backends.gathered import accumulate, total_for

B, H, Q, KV = 2, 3, 5, 7
b = torch.arange(B).view(B, 1, 1, 1)
h = torch.arange(H).view(1, H, 1, 1)
q = torch.arange(Q).view(1, 1, Q, 1)
kv = torch.arange(KV).view(1, 1, 1, KV)

PATTERNS = {
    "a scalar": ((), []),
    "one number per head": ((H,), [h]),
    "a row": ((H, Q), [h, q]),
    "a column": ((B, KV), [b, kv]),
    "a pair": ((Q, KV), [q, kv]),
    "everything": ((B, H, Q, KV), [b, h, q, kv]),
    "a distance": ((Q + KV,), [q - kv + KV]),
    "a distance and a head": ((H, Q + KV), [h, q - kv + KV]),
    "a distance the other way, clamped": ((4,), [(kv - q).clamp(-1, 2) + 1]),
    "a distance, negative positions from the end": ((Q + KV,), [q - kv]),
    "a distance in two dimensions": ((3, 3), [(q - kv) % 3, (q - kv) // 3 % 3]),
    "a sum": ((Q + KV,), [q + kv]),
    "a gather": ((4,), [(q * q + 3 * kv * h) % 4]),
    "a constant": ((4,), [torch.tensor(2)]),
    "positions outside, clamped as reads are": ((3,), [q + kv]),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rows", [slice(0, Q), slice(1, 2), slice(2, 4)], ids=["all rows", "one row", "some rows"])
def test_adds_up_for(pattern, rows, generator):
    shape, indices = PATTERNS[pattern]
    values = torch.randn(B, H, Q, KV, generator=generator, dtype=torch.float64)[:, :, rows]
    indices = [i[..., rows, :] if i.ndim and i.shape[-2] > 1 else i for i in indices]
    total = total_for(torch.empty(shape), torch.float64, torch.device("cpu"))
    expected = torch.zeros(shape, dtype=torch.float64)
    wrapped = [torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in zip(indices, shape, strict=True)]
    places = [i.expand(values.shape) for i in wrapped]
    for place in torch.cartesian_prod(*map(torch.arange, values.shape)).tolist():
        expected[tuple(int(i[tuple(place)]) for i in places)] += values[tuple(place)]
    accumulate(total, values, indices)
    accumulate(total, values, indices)
    torch.testing.assert_close(total, 2 * expected)


def test_few_elements_are_summed_in_fp64():
    million = torch.full((1, 1, 1024, 1024), 0.1)
    total = total_for(torch.empty(2), torch.float32, torch.device("cpu"))
    accumulate(total, million, [torch.zeros(1, 1, 1024, 1, dtype=torch.int64)])
    assert total.dtype == torch.float64
    assert float(total[0]) == pytest.approx(0.1 * 2**20, rel=1e-7)
