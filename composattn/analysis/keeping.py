"""Whether memory that a call makes may outlive it: not below an operator, where it may belong to a CUDA graph.

Tables and lists of tiles are kept from call to call where nothing changed. Compiled code that torch runs as CUDA graphs
(mode "reduce-overhead") gives operators memory of the graph's own pool, and refuses to go on when some of it is still
held after the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_may_keep: ContextVar[bool] = ContextVar("may_keep", default=True)


def may_keep() -> bool:
    """Whether what is made now may be held after the call."""
    return _may_keep.get()


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Inside, nothing that is made is held on to; what was kept before may be used."""
    token = _may_keep.set(False)
    try:
        yield
    finally:
        _may_keep.reset(token)
