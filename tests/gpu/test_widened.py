"""Mods whose integers leave 32 bits, on a GPU."""

from __future__ import annotations

import pytest

from tests.compile.test_widened_emulated import hold
from tests.support import gpu_backend


@pytest.mark.parametrize("d", [64, 128, 256])
def test_integers_beyond_32_bits_are_those_of_torch(d: int) -> None:
    hold(gpu_backend(), d, "cuda")
