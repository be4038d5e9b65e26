"""Mods whose integers leave 32 bits, as hashes of positions do, in generated kernels: torch computes them in int64."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from tests.widened import hold


@pytest.mark.parametrize(
    ("backend", "d"),
    [
        ("hopper-emulated", 64),
        pytest.param("blackwell-emulated", 128, marks=pytest.mark.slow),
        pytest.param("hopper-emulated", 128, marks=pytest.mark.slow),
        pytest.param("blackwell-emulated", 64, marks=pytest.mark.slow),
    ],
)
def test_integers_beyond_32_bits_are_those_of_torch(backend: str, d: int) -> None:
    hold(backend, d)
