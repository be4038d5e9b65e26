"""Which form is fastest for one call: every candidate in turns on this GPU, and what is kept of it for later calls."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from .api import Attention
from .backends.fused.compiling import tuned
from .backends.fused.compiling.tuned import Tuned
from .call.inputs import Inputs
from .errors import BackendUnavailable
from .watched import LOG

Direction = Literal["forward", "backward"]
Stopwatch = Callable[[Callable[[], object]], float]  # milliseconds that a call takes
ROUNDS = 11
SAMPLE_MS = 10.0  # of calls between two events, in which clocks and caches settle


@dataclasses.dataclass(frozen=True)
class Timed:
    """Milliseconds of each candidate of one direction, `own` the one that the table has; what is kept of it."""

    direction: Direction
    own: str
    ms: dict[str, float]
    kept: Tuned | None

    def __str__(self) -> str:
        lines = [f"{self.direction}: the table says {self.own}"]
        lines += [f"  {ms:9.4f} ms  {form}" for form, ms in sorted(self.ms.items(), key=lambda found: found[1])]
        return "\n".join([*lines, f"  kept: {self.kept}" if self.kept else "  one candidate: nothing to choose"])


def tune(
    attention: Callable[[], Attention], inputs: Inputs, gradient: bool, stopwatch: Stopwatch, gpu: str
) -> Iterator[Timed]:
    """Times all candidates of a call, and of its gradient, and keeps the fastest of each.

    `attention` makes the call anew, as a plan is made once; `inputs` with numbers in them; `stopwatch` takes the time.
    """
    for direction in ("forward", "backward") if gradient else ("forward",):
        yield _timed(direction, attention, inputs, stopwatch, gpu)  # type: ignore[arg-type]


def _timed(
    direction: Direction, attention: Callable[[], Attention], inputs: Inputs, stopwatch: Stopwatch, gpu: str
) -> Timed:
    with tuned.asking() as asked:
        _call(direction, attention(), inputs)
    met = {key: forms for key, forms in asked.met.items() if key.startswith(direction)}
    if not met:
        raise BackendUnavailable(
            f"nothing to tune: no table of forms chose the {direction} of this call; batch-invariant calls, and "
            'those of other backends than "hopper", have one form each'
        )
    own, names = next(iter(met.values()))[0], list(dict.fromkeys(name for forms in met.values() for name in forms))
    calls = {}
    for number, name in enumerate(names, 1):
        LOG.info("%s, form %d of %d: %s", direction, number, len(names), name)
        with tuned.asking(**{direction: name}):  # a plan, and its kernels, are made when first asked for
            calls[name] = _call(direction, attention(), inputs)
    LOG.info("%s: timing %d forms in turns, %d rounds", direction, len(names), ROUNDS)
    rounds = [{name: stopwatch(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    ms = {name: statistics.median(found[name] for found in rounds) for name in calls}
    return Timed(direction, own, ms, _kept(met, ms, gpu))


def _kept(met: dict[str, list[str]], ms: dict[str, float], gpu: str) -> Tuned | None:
    if len(ms) == 1:
        return None
    best, second = sorted(ms, key=lambda name: ms[name])[:2]
    found = Tuned(best, second, ms[second] / ms[best], gpu)
    tuned.keep({key: found for key, forms in met.items() if best in forms})
    return found


def _call(direction: Direction, attention: Attention, inputs: Inputs) -> Callable[[], object]:
    """The call, which was made once."""
    q, k, v, varlen, paged = inputs

    def forward() -> Any:
        return attention(q, k, v, varlen=varlen, paged=paged)

    if direction == "forward":
        with torch.no_grad():
            forward()
        return torch.no_grad()(forward)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = forward()
    dout = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    backward()
    return backward


def gpu_stopwatch(call: Callable[[], object]) -> float:
    """Milliseconds between two events on the GPU, of as many calls as take `SAMPLE_MS`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def took(count: int) -> float:
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    return took(max(1, round(SAMPLE_MS / max(took(1), 1e-3))))
