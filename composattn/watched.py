"""What calls tell of themselves: a log of what takes long, and ranges with their names in profiles.

    logging.basicConfig(level=logging.INFO)      # kernels as they are compiled, with their seconds
    with torch.profiler.profile() as profile:    # "composattn forward: causal & sliding_window(512), hopper"
        out = ca.attention(q, k, v, ...)

The logger is "composattn". Ranges are those of `torch.profiler.record_function`: torch's profiler has them, and NVTX
inside of `torch.autograd.profiler.emit_nvtx()`, which Nsight shows. Where nobody profiles, a launch reads torch's flag
that says so, 0.1 µs, and makes none.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.autograd import profiler

LOG = logging.getLogger("composattn")

Method = TypeVar("Method", bound=Callable[..., Any])

_said: set[str] = set()


def say_once(kind: str, message: str) -> None:
    """A warning in the log, the first of its kind in this process."""
    if kind not in _said:
        _said.add(kind)
        LOG.warning(message)


@contextlib.contextmanager
def timed(what: str, where: str) -> Iterator[None]:
    """Tells the log that `what` is compiled, and behind it how long that took, and `where` it is kept."""
    LOG.info("compiling %s", what)
    start = time.perf_counter()
    yield
    LOG.info("compiled %s: %.1f s, kept in %s", what, time.perf_counter() - start, where)


@contextlib.contextmanager
def on_screen() -> Iterator[None]:
    """Inside, the log is written to stderr, a line where something begins; where logging is set up that decides."""
    if LOG.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


def in_range(direction: str) -> Callable[[Method], Method]:
    """A method that runs in a range, where somebody profiles; `self.range_name(direction)` names it."""

    def wrapped(method: Method) -> Method:
        @functools.wraps(method)
        def ranged(self: Any, *given: Any, **named: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, *given, **named)
            with profiler.record_function(self.range_name(direction)):
                return method(self, *given, **named)

        return ranged  # type: ignore[return-value]

    return wrapped


def range_name(direction: str, title: str, backend: str) -> str:
    """The name of a range: "composattn backward: causal, alibi, hopper"."""
    return f"composattn {direction}: {title}, {backend}"
