"""What the tests on a GPU share: gradients that its architecture refuses by head dimension are left out, by name."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from composattn.errors import GradientUnsupported


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except GradientUnsupported as refused:
        if not any(words in str(refused) for words in ("has gradients for D and Dv up to", "has no backward yet")):
            raise
        pytest.skip(str(refused))
