"""Products of what tensor cores multiply: right in all shapes, and in pieces that BLAS does in one thread."""

from __future__ import annotations

import numpy as np
import pytest

from composattn.emulator.opcodes.operands import product


@pytest.mark.parametrize("k", [8, 16, 32, 48, 256])
@pytest.mark.parametrize(("m", "n"), [(64, 8), (64, 256), (128, 64), (128, 256)])
def test_of_all_shapes_in_small_pieces(m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    left, right = (draw.integers(-8, 8, (rows, k)).astype(np.float32) for rows in (m, n))
    wanted, whole, sizes = left @ right.T, np.matmul, []

    def counted(a: np.ndarray, b: np.ndarray, **given: np.ndarray) -> np.ndarray:
        sizes.append(a.size * b.shape[1])
        return whole(a, b, **given)

    monkeypatch.setattr(np, "matmul", counted)
    found = product(left, right)
    assert found.dtype == np.float32 and np.array_equal(found, wanted)
    assert sum(sizes) == m * n * k and max(sizes) <= 2**18
