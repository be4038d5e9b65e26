"""A GPU and the emulator run the same kernel on the same inputs and agree to the bounds of the comparison script."""

from __future__ import annotations

import pytest

from benchmarks.emulator_agreement import CONFIGS, Config, compare
from tests.support import gpu_backend


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu_and_emulator_agree(config: Config) -> None:
    row = compare(config, gpu_backend())
    assert row["within"], row
