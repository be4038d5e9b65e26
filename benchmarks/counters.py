"""Hardware counters of a row's kernels, ours and the peers', and the clock and power at which their calls repeat.

    python -m benchmarks.counters --only 'D64 S8192 full'      needs ncu (Nsight Compute) and a GPU for itself alone

Two passes over the rows. The first times the calls in turns and then repeats each, with the chip's
clock and energy read beside it. In the second, a process of its own under ncu, each call runs once: ncu launches every
kernel as often as its counters need passes, with the memory as it was. Clocks stay as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import functools
import io
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case, select
from benchmarks.implementations import DETERMINISTIC, OURS, PACKED, Implementation, available
from benchmarks.provenance import ROOT, provenance
from benchmarks.run import Row, draw, error_row, save
from benchmarks.tilings import Variant
from benchmarks.timing import Call, Stopwatch, captured, interleaved

OUT = ROOT / "benchmarks" / "results" / "counters"
FLASH, CUDNN = "flash-attn-4", "torch cuDNN"
MEASURED = (OURS, PACKED, DETERMINISTIC, FLASH, CUDNN)
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait",
)  # fmt: skip

# Shares are percent of what the unit can do while the SM has a block (of L2 and memory, while the kernel
# runs). A stall is how many warps of a scheduler wait for this reason in a clock in which one is issued.
METRICS: dict[str, str] = {
    "ns": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "occupied": "sm__cycles_active.avg",
    "waves": "launch__waves_per_multiprocessor",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "instructions": "smsp__inst_executed.sum",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "matrix": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "matrix_hmma": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "matrix_issued": "sm__inst_executed_pipe_tensor.sum",
    "exp": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "banks_read": "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "banks_written": "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "l2_reduced": "lts__t_sectors_op_red.sum",
    "memory": "dram__bytes.sum.pct_of_peak_sustained_elapsed",
    "memory_bytes": "dram__bytes.sum",
} | {f"stall_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS}
MARK = "spin_kernel"  # torch.cuda._sleep: stands before the kernels of each call


def call_of(case: Case, implementation: Implementation, device: torch.device) -> Call:
    """The case's call, kernels compiled. Inputs are of one seed, so that all have the same."""
    torch.manual_seed(0)
    job = implementation.prepare(case, case.pattern(case, device), draw(case, device))
    if case.direction == "forward":
        call: Call = torch.no_grad()(functools.partial(job.forward, *job.leaves))
    else:
        out, leaves = job.forward(*job.leaves), (*job.leaves, *job.learned)
        call = functools.partial(torch.autograd.grad, out, leaves, job.grad, retain_graph=True)
    call()
    torch.cuda.synchronize()
    return call


def calls_of(case: Case, names: Iterable[str], device: torch.device) -> tuple[dict[str, Call], list[Row]]:
    """What is measured of a row, by implementation, and a row of each that has no call for it.

    Names that are fields with values are variants of the tiling.
    """
    found: dict[str, Call] = {}
    failed: list[Row] = []
    by_name: dict[str, Implementation] = {i.name: i for i in available(device)}
    for name in names:
        try:
            found[name] = call_of(case, Variant(name) if "=" in name else by_name[name], device)
        except Exception as error:  # peers raise what they like
            failed.append(error_row(case, name, error))
    return found, failed


class Meter:
    """Energy and clock of a GPU, from NVML."""

    SM = 1  # NVML_CLOCK_SM
    POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap

    def __init__(self, device: torch.device) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.gpu = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.gpu))

    def _ask(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.nvml, function)(*arguments):
            raise RuntimeError(f"{function} returned {code}")

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self.gpu, ctypes.byref(found))
        return found.value * 1e-3

    def mhz(self) -> int:
        found = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self.gpu, self.SM, ctypes.byref(found))
        return found.value

    def is_capped(self) -> bool:
        """Whether power holds the clock down."""
        found = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.gpu, ctypes.byref(found))
        return bool(found.value & self.POWER_CAP)


def repeated(call: Call, ms: float, meter: Meter, seconds: float) -> Row:
    """`call` again and again: milliseconds of one, and the clock and the power of the last half of the time.

    The power cap is a slow one: of two calls repeated for 0.4 seconds the first ran at 710 to 740 W and the next, held
    down for that, at 550 to 620.
    """
    count = max(4, round(seconds * 1e3 / ms))
    clocks: list[tuple[int, bool]] = []
    energy: list[tuple[float, float]] = []
    done = threading.Event()

    def watch() -> None:
        time.sleep(seconds / 2)
        while not done.wait(0.004):
            clocks.append((meter.mhz(), meter.is_capped()))
            energy.append((time.perf_counter(), meter.joules()))

    watcher = threading.Thread(target=watch)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    watcher.start()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    done.set()
    watcher.join()
    found: Row = {"repeated_ms": begin.elapsed_time(end) / count}
    # The counter moves in steps: from the first step seen to the last one.
    steps = [b for a, b in itertools.pairwise(energy) if b[1] != a[1]]
    if clocks:
        found["mhz"] = sum(mhz for mhz, _ in clocks) / len(clocks)
        found["capped"] = sum(capped for _, capped in clocks) / len(clocks)
    if len(steps) > 2:
        found["watts"] = (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])
    return found


def timed(
    case: Case, names: Sequence[str], device: torch.device, options: argparse.Namespace, meter: Meter
) -> list[Row]:
    """Rows of a case without counters yet."""
    calls, failed = calls_of(case, names, device)
    shown = {name: captured(call) for name, call in calls.items()} if case.in_graph else calls
    timings = interleaved(shown, Stopwatch(device), rounds=options.rounds, limit_s=4.0)
    rows = []
    for name, timing in timings.items():
        row: Row = {"row": case.name, "impl": name, "ms": timing.ms, "spread": timing.spread}
        rows.append(row | (repeated(shown[name], timing.ms, meter, options.repeat) if options.repeat else {}))
    return rows + failed


# --- under ncu ----------------------------------------------------------------------------------------------------


def run_once(wanted: Sequence[tuple[Case, Sequence[str]]], told: Path, seconds: float) -> None:
    """Each call once between the profiler's start and stop, a mark before it; writes whose they were, in order."""
    device = torch.device("cuda")
    start, ran = time.monotonic(), []
    torch.cuda._sleep(1)
    for case, names in wanted:
        if time.monotonic() - start > seconds:
            break
        calls, _ = calls_of(case, names, device)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for name, call in calls.items():
            torch.cuda._sleep(1)
            call()
            ran.append((case.name, name))
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        told.write_text(json.dumps(ran))
        calls.clear()
        torch.cuda.empty_cache()


def known_metrics(ncu: str) -> list[str]:
    """The `METRICS` that this ncu knows on this chip."""
    done = subprocess.run([ncu, "--query-metrics", "--chips", "gh100"], capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    if not any("__" in name for name in names):
        return list(METRICS.values())
    return [m for m in METRICS.values() if m.startswith("launch__") or m.partition(".")[0] in names]


def profiled(wanted: Sequence[tuple[Case, Sequence[str]]], seconds: float) -> dict[tuple[str, str], list[Row]]:
    """Counters of each kernel of each (row, implementation), in the order in which a call launches them."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise FileNotFoundError("ncu is needed: it comes with CUDA's toolkit, as Nsight Compute")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "wanted.json").write_text(json.dumps([(case.name, list(names)) for case, names in wanted]))
        program = [sys.executable, "-m", "benchmarks.counters", "--once", str(folder), "--seconds", str(seconds)]
        options = ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        asked = [ncu, *options, "--metrics", ",".join(known_metrics(ncu)), "-f", "-o", str(folder / "report"), *program]
        subprocess.run(asked, cwd=ROOT, check=False, timeout=seconds + 120)
        shown = [ncu, "--import", str(folder / "report.ncu-rep"), "--csv", "--page", "raw", "--print-units", "base"]
        text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        return by_call(text, [tuple(pair) for pair in json.loads((folder / "ran.json").read_text())])


def by_call(text: str, ran: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[Row]]:
    """ncu's page of raw values as kernels of each call: marks part them, in the order of `ran`."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]  # the first row has the units
    found: dict[tuple[str, str], list[Row]] = {}
    calls = iter(ran)
    of_call: list[Row] = []
    for kernel in kernels:
        if MARK in kernel["Kernel Name"]:
            of_call = found.setdefault(next(calls), [])
        else:
            of_call.append({"kernel": kernel["Kernel Name"]} | dict(_numbers(kernel)))
    return found


def _numbers(kernel: dict[str, str]) -> Iterator[tuple[str, float]]:
    for name, metric in METRICS.items():
        with contextlib.suppress(ValueError):  # n/a
            if kernel.get(metric):
                yield name, float(kernel[metric].replace(",", ""))


def worth_counting(rows: Iterable[Row]) -> list[str]:
    """Ours with its variants, flash-attn-4 and the fastest peer of a row's timed implementations."""
    known = {row["impl"]: row["ms"] for row in rows if "ms" in row}
    ours = [name for name in known if name.startswith(OURS) or "=" in name]
    peers = sorted(known.keys() - ours, key=lambda name: known[name])
    return [name for name in known if name in (*ours, *peers[:1], FLASH)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    made.add_argument("--only", nargs="+", default=["."], help="regular expressions on the case's name, in this order")
    made.add_argument("--impl", nargs="+", default=MEASURED, help="only these implementations, by name")
    made.add_argument("--variant", action="append", default=[], help="fields of a tiling, as tilings.py has them")
    made.add_argument("--rounds", type=int, default=6, help="interleaved rounds a case (at least 4)")
    made.add_argument("--repeat", type=float, default=2.0, help="seconds for which each call repeats; 0: it does not")
    made.add_argument("--seconds", type=float, default=120.0, help="no row is begun after so long in a pass")
    made.add_argument("--out", type=Path, help="result file; default: benchmarks/results/counters/CHIP.json")
    made.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cases = {case.name: case for only in options.only for case in select(["all"], only)}
    if options.once is not None:
        wanted = [(cases[row], names) for row, names in json.loads((options.once / "wanted.json").read_text())]
        run_once(wanted, options.once / "ran.json", options.seconds)
        return 0
    device = torch.device("cuda")
    chip = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    out = options.out or OUT / f"{chip}.json"
    result: dict[str, Any] = {**provenance(device), "rows": []}
    meter, wanted, start = Meter(device), [], time.monotonic()
    for case in cases.values():
        if time.monotonic() - start > options.seconds:
            break
        try:
            rows = timed(case, [*options.impl, *options.variant], device, options, meter)
        except Exception as error:  # out of memory, say: the other rows still run
            rows = [error_row(case, "harness", error)]
        result["rows"] += rows
        wanted.append((case, worth_counting(rows)))
        for row in rows:
            words = (f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
            print(f"{row['row']}: {row['impl']}: {row.get('error') or ', '.join(words)}", flush=True)
        save(result, out)
        torch.cuda.empty_cache()
    counted = profiled(wanted, options.seconds)
    for row in result["rows"]:
        row["kernels"] = counted.get((row["row"], row["impl"]), [])
    save(result, out)
    print(f"{sum(bool(row['kernels']) for row in result['rows'])} calls counted; kept in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
