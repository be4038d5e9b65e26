"""What the tests on a GPU share: which backend calls mean, and that what it refuses is left out, in its words."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from composattn import settings
from composattn.backends import default_for
from composattn.errors import GradientUnsupported, UnsupportedDType, UnsupportedHeadDim
from tests.support import gpu_backend

REFUSALS: dict[type[Exception], tuple[str, ...]] = {
    GradientUnsupported: ("has gradients for D and Dv up to", "has no backward yet"),
    UnsupportedHeadDim: ("up to 256, got",),  # Hopper's kernels have more
    UnsupportedDType: ("no kernel on blackwell", "no kernel on warp"),  # of 8 bits
}


@pytest.fixture(autouse=True)
def _calls_that_name_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """They mean the one under test too, where it is not the GPU's own: see `gpu_backend`."""
    if gpu_backend() != default_for(torch.device("cuda")):
        monkeypatch.setattr(settings, "BACKEND", gpu_backend())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except tuple(REFUSALS) as refused:
        if not any(words in str(refused) for words in REFUSALS.get(type(refused), ())):
            raise
        pytest.skip(str(refused))
