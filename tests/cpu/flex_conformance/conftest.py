"""All tests here are small."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _small_tensors(one_thread: None) -> None:
    pass
