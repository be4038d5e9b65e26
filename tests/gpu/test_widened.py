"""Mods whose integers leave 32 bits, on a GPU."""

from __future__ import annotations

import pytest

from tests.support import gpu_backend
from tests.widened import hold


@pytest.mark.parametrize("d", [64, 128, 256])
def test_integers_beyond_32_bits_are_those_of_torch(d: int) -> None:
    hold(gpu_backend(), d, "cuda")
