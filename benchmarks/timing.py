"""How time is taken: implementations take turns, each behind each other one, so that what the machine does hits them
alike: a power-limited chip is slower behind a call that drew more power.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median over the rounds, (upper - lower quartile) / median, and the least of them."""

    ms: float
    spread: float
    least: float


HEAD_START = 4_000_000  # clocks that the GPU waits before a sample: 2 ms, in which the host issues the first call


class Stopwatch:
    """Milliseconds that `count` calls take: on a GPU between two events, on a CPU by the clock.

    The GPU waits a little before the first event, else a sample has in it how long the host takes to issue its first
    call, with the GPU idle (`host_stopwatch` is for that). `ahead`: and so many clocks more for each call: short ones
    are over before a busy host has issued the next.
    """

    def __init__(self, device: torch.device, ahead: int = 0) -> None:
        self.cuda = device.type == "cuda"
        self._ahead = ahead

    def __call__(self, call: Call, count: int) -> float:
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) * 1e3
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START + count * self._ahead)
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def host_stopwatch(call: Call, count: int) -> float:
    """Milliseconds until the host has issued `count` calls; the device may still be at work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = (time.perf_counter() - start) * 1e3
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return elapsed


def captured(call: Call) -> Call:
    """Replays `call` from a CUDA graph: what is left is what the GPU does. Forward only.

    The replay holds `call`, whose inputs a graph reads by their addresses.
    """
    with torch.no_grad():
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

    def replay(_: Call = call) -> None:
        graph.replay()

    return replay


def summary(samples: list[float]) -> Timing:
    if len(samples) < 4:
        raise ValueError(f"a spread needs at least 4 rounds, got {len(samples)}")
    lower, median, upper = statistics.quantiles(samples, n=4)
    return Timing(median, (upper - lower) / median, min(samples))


def balanced_orders(names: list[str]) -> list[list[str]]:
    """Orders in which each name stands behind each other one equally often (Williams 1949): as many, twice if odd."""
    count = len(names)
    zigzag = [(n + 1) // 2 if n % 2 else -(n // 2) for n in range(count)]
    orders = [[names[(turn + step) % count] for step in zigzag] for turn in range(count)]
    return orders if count % 2 == 0 else orders + [order[::-1] for order in orders]


def interleaved(
    calls: dict[str, Call],
    stopwatch: Callable[[Call, int], float],
    *,
    rounds: int = 15,
    sample_ms: float = 10.0,
    limit_s: float = 60.0,
) -> dict[str, Timing]:
    """Time every call in every round, in balanced orders; a sample lasts about `sample_ms`.

    Stops early, after at least 4 rounds, when `limit_s` is spent.
    """
    counts = {}
    for name, call in calls.items():
        stopwatch(call, 3)  # warm: clocks, caches, lazily loaded modules
        counts[name] = max(1, min(1000, round(sample_ms / max(stopwatch(call, 3) / 3, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    orders = balanced_orders(list(calls))
    start = time.perf_counter()
    for number in range(rounds):
        if number >= 4 and time.perf_counter() - start > limit_s:
            break
        for name in orders[number % len(orders)]:
            samples[name].append(stopwatch(calls[name], counts[name]) / counts[name])
    return {name: summary(taken) for name, taken in samples.items()}


def peak_extra_bytes(call: Call) -> int:
    """Device memory that one warm call needs at its peak beyond what was allocated before; its output counts."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds` of it (as soon as Python runs again)."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
