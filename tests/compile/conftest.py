"""What the tests of compiled kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest

from composattn.backends.fused.compiling import disk_cache


@pytest.fixture
def folder() -> Path:
    """Where kernels are kept that are compiled to be looked at: by content, so a plan of several tests compiles once.

    The folder that the emulator takes its kernels from, and tests/compile/golden.py.
    """
    return disk_cache.usable() / "offline"
