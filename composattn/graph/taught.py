"""Dynamo is taught to hand mods over the first time there is one. What teaches it imports Dynamo."""

from __future__ import annotations

import threading


def teach_dynamo() -> bool:
    """Has Dynamo hand mods over; run for real while Dynamo traces, as a function that is constant to it."""
    from .followed import install

    with _lock:
        if not _taught:
            install()
            _taught.append(True)
    return True


_taught: list[bool] = []
_lock = threading.Lock()
# what torch.compiler.assume_constant_result sets
teach_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]
