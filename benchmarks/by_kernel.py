"""Where the time of a call goes, kernel by kernel: ours, other tilings (`tilings.py`) and peers, by torch's profiler.

    python -m benchmarks.by_kernel "^backward D128 S1024 causal$" "persistent=False" --peer flash-attn-4

A case is named by a regular expression on `benchmarks/run.py --list`. Microseconds of the GPU, means over `--calls`
calls that follow each other. A kernel that starts while the one before drains counts from there, so their sum is more
than the call's time, which stands in front.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import CASES, Case
from benchmarks.implementations import Composattn, Implementation, Job, NotServed, available
from benchmarks.run import draw
from benchmarks.tilings import Variant


def call_of(case: Case, job: Job) -> Callable[[], object]:
    """What is timed: the forward, or the backward of one forward."""
    if case.direction != "backward":
        return lambda: job.forward(*job.leaves)
    out, asked = job.forward(*job.leaves), (*job.leaves, *job.learned)
    return lambda: torch.autograd.grad(out, asked, job.grad, retain_graph=True)


def by_kernel(call: Callable[[], object], calls: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a call, and of its kernels by their names, in the order in which they ran."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = defaultdict(float)
    for event in profiled.events() or ():
        if event.device_time > 0:
            found[event.name] += event.device_time / calls
    return 1000 * begin.elapsed_time(end) / calls, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="regular expression on the names of cases")
    parser.add_argument("variants", nargs="*", help='such as "persistent=False"')
    parser.add_argument("--peer", nargs="+", default=[], help="implementations beside, by name")
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels are timed on a GPU, and there is none")
    device = torch.device("cuda")
    for case in (c for c in CASES if re.search(options.case, c.name)):
        print(case.name, flush=True)
        pattern, inputs = case.pattern(case, device), draw(case, device)
        peers = [i for i in available(device, None) if i.name in options.peer]
        measured: list[Implementation] = [Composattn(), *map(Variant, options.variants), *peers]
        for implementation in measured:
            try:
                call = call_of(case, implementation.prepare(case, pattern, inputs))
            except NotServed as reason:
                print(f"    {implementation.name}: {reason}")
                continue
            whole, kernels = by_kernel(call, options.calls)
            print(f"    {implementation.name}: {whole:.1f} us", flush=True)
            for name, took in kernels.items():
                print(f"        {took:8.1f}  {name[:90]}", flush=True)


if __name__ == "__main__":
    main()
