"""Gradients of rows of nearly one key, on a GPU."""

from __future__ import annotations

import pytest

from tests.one_hot_rows import gradient_errors
from tests.support import gpu_backend, needs_backward


@pytest.mark.parametrize(("size", "most"), [(60.0, 0.2), (15.0, 0.02), (4.0, 0.004)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_gradients_of_rows_of_nearly_one_key(d: int, size: float, most: float) -> None:
    backend = gpu_backend()
    needs_backward(backend)
    assert max(gradient_errors(backend, size, 200, d, "cuda")) < most
