"""Many cases in little GPU time, and trees against each other: compiled by processes side by side, timed one at a time.

    python -m benchmarks.turns "^forward D(128|64) " --workers 8 --rounds 10 --out result.json
    python -m benchmarks.turns "forward D64 S8192 full" --tree now=. --tree before=../before --variant "tile_n=112"

`run.py` compiles a case while the GPU waits, which is most of the time that a lent GPU is held. Here every process
prepares and checks cases as `run.py` does (`make_ready`) and keeps their calls; when all are ready, one call after the
other is timed, across processes, in `timing.py`'s balanced orders. So trees and variants of a tiling (`tilings.py`) are
compared within the same minute. Peers run in the first tree's process.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

if __package__ in (None, ""):
    # A process of an older tree, which need not have this file: everything else is that tree's.
    sys.path[0] = os.getcwd()

from benchmarks.candidates import NAMES, Candidate
from benchmarks.cases import CASES, Case, Pattern
from benchmarks.implementations import (
    DETERMINISTIC,
    GEMM,
    OURS,
    PACKED,
    PACKED_IN_ORDER,
    Implementation,
    Inputs,
    Job,
    available,
    gemm,
)
from benchmarks.provenance import provenance
from benchmarks.run import Row, in_graphs, make_ready, result_row, save
from benchmarks.shapes import every_shape, shape_named
from benchmarks.tilings import Variant
from benchmarks.timing import Call, Stopwatch, balanced_orders, summary

Message = dict[str, Any]
SAMPLE_MS = 10.0
AHEAD = 400_000  # clocks that the GPU waits for each call of a sample: 0.2 ms
LONGEST_ANSWER_S = 240.0


@dataclasses.dataclass(frozen=True)
class Named:
    """A variant by the name that its row has."""

    name: str
    _variant: Variant | Candidate

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        return self._variant.prepare(case, pattern, inputs)


class Prepared:
    """A case's calls in this process, as the coordinator asks for them."""

    def __init__(self, case: Case, implementations: list[Implementation], device: torch.device, beside: bool) -> None:
        self.case = case
        self.stopwatch = Stopwatch(device, AHEAD)
        self.calls, self.errors, self.failed, self.visible = make_ready(case, implementations, device, 120.0)
        if beside and case.measure == "tflops":  # here, as an older tree's `make_ready` knows of none
            self.calls[GEMM] = gemm(device)
        self._originals: dict[str, Call] = {}

    def begin(self) -> None:
        """Captured only now: a graph that waits holds its pool."""
        if self.case.in_graph:
            self._originals = self.calls
            self.calls, refused = in_graphs(self.case, self.calls)
            self.failed += refused

    def milliseconds(self, name: str, count: int) -> float:
        with torch.set_grad_enabled(self.case.direction == "backward"):
            return self.stopwatch(self.calls[name], count)


def serve() -> None:
    """Answers each line of JSON on stdin by one on stdout; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    by_name = {case.name: case for case in CASES}
    kept: dict[str, Prepared] = {}

    def implementation(name: str) -> Implementation:
        kind, _, fields = name.partition(": ")
        of = next(i for i in available(device) if i.name == kind)
        if not fields:
            return of
        return Named(name, Candidate(fields, of) if fields in NAMES else Variant(fields, of))

    def answer(asked: Message) -> Message:
        name = asked["case"]
        if asked["do"] == "prepare":
            torch.manual_seed(asked["seed"])
            asked_for = [implementation(i) for i in asked["implementations"] if i != GEMM]
            made = Prepared(by_name.get(name) or shape_named(name), asked_for, device, GEMM in asked["implementations"])
            kept[name] = made
            gc.collect()
            torch.cuda.empty_cache()  # what checking took, of a memory that processes share
            return {"errors": made.errors, "failed": made.failed, "visible": made.visible}
        if asked["do"] == "begin":
            kept[name].begin()
            return {"calls": list(kept[name].calls), "failed": kept[name].failed}
        if asked["do"] == "end":
            del kept[name]
            torch.cuda.empty_cache()
            return {}
        return {"ms": kept[name].milliseconds(asked["implementation"], asked["count"])}

    for line in sys.stdin:
        try:
            told = answer(json.loads(line))
        except Exception as error:  # peers raise what they like; the coordinator reports it
            told = {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        print(json.dumps(told), file=answers, flush=True)


class Raised(Exception):
    """What a process answered in place of a result."""


class Process:
    """One process in one tree."""

    def __init__(self, tree: Path, log: IO[str]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        environment = {**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )

    def ask(self, **message: Any) -> Message:
        """The answer; a process that gives none for minutes, as behind a kernel that never ends, is ended."""
        guard = threading.Timer(LONGEST_ANSWER_S, self._process.kill)
        guard.start()
        try:
            return self._asked(message)
        finally:
            guard.cancel()

    def _asked(self, message: Message) -> Message:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Raised("the process ended")
        told: Message = json.loads(line)
        if "raised" in told:
            raise Raised(told["raised"])
        return told

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.kill()


Holders = dict[str, Process]  # by tree


class Team:
    """Processes of each tree that prepare cases side by side, and keep them until they are timed."""

    def __init__(self, trees: dict[str, Path], workers: int, log: Path) -> None:
        self._trees, self._log = trees, log
        self._processes: dict[tuple[str, int], Process] = {}
        self._places = [(tree, n) for tree in trees for n in range(workers)]

    def prepare(
        self, cases: list[Case], wanted: Callable[[Case, bool], list[str]], options: argparse.Namespace
    ) -> tuple[dict[str, Holders], dict[str, dict[str, Message]]]:
        """Each case's processes and what they said, by tree. Cases left when the time is over are left out."""
        stop_at = time.monotonic() + options.prepare
        holders: dict[str, Holders] = {case.name: {} for case in cases}
        told: dict[str, dict[str, Message]] = {case.name: {} for case in cases}
        waiting: dict[str, queue.SimpleQueue[Case]] = {tree: queue.SimpleQueue() for tree in self._trees}
        for queued in waiting.values():
            for case in cases:
                queued.put(case)

        def work(place: tuple[str, int]) -> None:
            tree = place[0]
            while time.monotonic() < stop_at:
                try:
                    case = waiting[tree].get_nowait()
                except queue.Empty:
                    return
                names = wanted(case, tree == next(iter(self._trees)))
                try:
                    process = self._process(place)
                    answer = process.ask(do="prepare", case=case.name, implementations=names, seed=options.seed)
                except Raised as error:
                    print(f"    {tree}: {case.name}: {error}", flush=True)
                    continue
                holders[case.name][tree] = process
                told[case.name][tree] = answer

        threads = [threading.Thread(target=work, args=(place,)) for place in self._places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        in_order = {name: {tree: said[tree] for tree in self._trees if tree in said} for name, said in told.items()}
        return holders, in_order

    def _process(self, place: tuple[str, int]) -> Process:
        """The process of this place, begun with its first case, and again where it ended."""
        process = self._processes.get(place)
        if process is None or process.ended:
            with self._log.open("a") as log:
                process = self._processes[place] = Process(self._trees[place[0]], log)
        return process

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()


def timed(case: Case, processes: Holders, told: dict[str, Message], options: argparse.Namespace) -> list[Row]:
    """The rows of a case, its calls in turns across trees; names of other trees than the first begin with theirs."""
    first = next(iter(told))
    rows: list[Row] = [row for message in told.values() for row in message["failed"]]
    owners: dict[str, tuple[Process, str, str]] = {}
    for tree, process in processes.items():
        for name in process.ask(do="begin", case=case.name)["calls"]:
            owners[name if tree == first else f"{tree}: {name}"] = (process, name, tree)

    def sample(shown: str, count: int) -> float:
        process, name, _ = owners[shown]
        ms: float = process.ask(do="time", case=case.name, implementation=name, count=count)["ms"]
        return ms

    counts = {}
    for shown in owners:
        sample(shown, 3)
        counts[shown] = max(1, min(1000, round(SAMPLE_MS / max(sample(shown, 3) / 3, 1e-3))))
    taken: dict[str, list[float]] = {shown: [] for shown in owners}
    orders = balanced_orders(list(owners))
    for number in range(options.rounds if owners else 0):
        for shown in orders[number % len(orders)]:
            taken[shown].append(sample(shown, counts[shown]) / counts[shown])
    for shown, (_, name, tree) in owners.items():
        error = told[tree]["errors"].get(name)
        rows.append(result_row(case, shown, summary(taken[shown]), told[tree]["visible"], error))
    for process in processes.values():
        process.ask(do="end", case=case.name)
    return rows


def show(case: Case, rows: list[Row], ours: set[str]) -> None:
    """Each of ours with its ratio to the best peer."""
    times = {row["impl"]: row["ms"] for row in rows if "ms" in row}
    best = min(((ms, name) for name, ms in times.items() if name not in {*ours, GEMM}), default=None)
    beside = f"best {best[1]} {best[0]:.4f} ms" if best else "no peer"
    print(f"{case.name} ({beside})", flush=True)
    for row in rows:
        if row["impl"] in ours and "ms" in row:
            ratio = f"{best[0] / row['ms']:.3f}" if best else "-"
            print(f"    {row['impl']:44} {row['ms']:9.4f} ms  {ratio}  spread {row['spread']:.1%}", flush=True)
        elif row["impl"] in ours:
            print(f"    {row['impl']:44} {row.get('error') or row.get('not served')}", flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("cases", nargs="?", default="", help="regular expression on the names of cases")
    made.add_argument("--shape", nargs="+", default=[], help="shapes too, by names as `shapes.py` has them")
    made.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER", help="default: this one")
    made.add_argument("--impl", nargs="+", help="only these implementations, by name")
    made.add_argument("--variant", action="append", default=[], help="fields of a tiling, as tilings.py has them")
    made.add_argument("--workers", type=int, default=8, help="processes a tree")
    made.add_argument("--prepare", type=float, default=200.0, help="seconds after which no case is compiled any more")
    made.add_argument("--wait-for", type=Path, help="nothing is timed before this file is there")
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--budget", type=float, default=400.0, help="seconds of timing after which no case is begun")
    made.add_argument("--log", type=Path, default=Path("/tmp/composattn-turns.log"), help="what the processes print")
    made.add_argument("--out", type=Path)
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> None:
    options = parser().parse_args()
    if options.serve:
        serve()
        return
    options.seed = int(time.time())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trees = {name: Path(folder).resolve() for name, _, folder in (tree.partition("=") for tree in options.tree)}
    trees = trees or {"this": Path.cwd()}
    there = [i.name for i in available(device)] + [GEMM] * (device.type == "cuda")
    names = [name for name in there if not options.impl or name in options.impl]
    kinds = [name for name in names if name in (OURS, PACKED, DETERMINISTIC, PACKED_IN_ORDER)]
    variants = [f"{kind}: {text}" for kind in kinds for text in options.variant]

    def wanted(case: Case, first: bool) -> list[str]:
        return [*(names if first else kinds), *variants]

    known = (*CASES, *every_shape()) if options.cases or not options.shape else ()
    cases = [*(case for case in known if re.search(options.cases, case.name)), *map(shape_named, options.shape)]
    cases = [case for case in cases if case.measure in ("tflops", "tbps")]
    start = time.monotonic()
    team = Team(trees, options.workers, options.log)
    holders, told = team.prepare(cases, wanted, options)
    ready = [case for case in cases if holders[case.name]]
    print(f"{len(ready)} of {len(cases)} cases are ready after {time.monotonic() - start:.0f} s", flush=True)
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.2)
    result: dict[str, Any] = {**provenance(device), "rows": []}
    ours = {f"{tree}{name}" for tree in ("", *(f"{t}: " for t in trees)) for name in (*kinds, *variants)}
    start = time.monotonic()
    for case in ready:
        if time.monotonic() - start > options.budget:
            print(f"budget of {options.budget:g} s is spent before {case.name}", flush=True)
            break
        try:
            rows = timed(case, holders[case.name], told[case.name], options)
        except Raised as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        show(case, rows, ours)
        result["rows"] += rows
        save(result, options.out)
    team.stop()


if __name__ == "__main__":
    main()
