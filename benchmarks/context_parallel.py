"""One sequence on several GPUs: this package's context parallel beside torch's, and beside gathering all keys.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --out FILE.jsonl --budget 165
    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --only check                    # against one GPU

A row is a forward and a backward: the median over rounds of the slowest rank's time, between two barriers, by the
GPU's own clock. First this package on one GPU, on all, and on all with nothing moved, in turns within a round; then
each peer in turns with it. `scaling` is the time on one GPU over that time and the number of ranks. `norms` are those
of dQ, dK and dV over all ranks, which must be alike. Rows are written as they are done; what fails, or has no time
left, is a row that says so.

Memory is what a rank's tensors take at the most, beside `rows_bytes`: what its own rows take (q, k, v, out, LSE and,
in a backward, their gradients) and the rows that it fetches (k, v and their gradients). `with_sums` adds the sums of
dQ in fp32 and two statistics of each row, which the backward has on one GPU too.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import composattn as ca
from benchmarks import context_parallel_checks as checks
from benchmarks.context_parallel_cases import HEAD_DIM, Case, Contestant, apart, here, one_gpu, settle, several_gpus
from benchmarks.context_parallel_peers import PEERS
from benchmarks.provenance import provenance

MASKS = ("documents", "window", "causal")
PEERS_IN_ORDER = (
    ("torch flex", "documents"),
    ("fa4 gathered", "causal"),
    ("torch ring", "causal"),
    ("fa4 gathered", "documents"),
    ("torch flex", "window"),
    ("fa4 gathered", "window"),
    ("torch flex", "causal"),
)  # by what they are worth


class Run:
    """Rows as they come, and where each rank is: by the clock, to its own file, so that a hang can be placed."""

    def __init__(self, out: str | None, budget: float) -> None:
        self.begin, self.budget, self.out = time.perf_counter(), budget, out
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.trace = open(f"{out}.rank{self.rank}", "a") if out else sys.stderr  # noqa: SIM115

    def at(self, what: str) -> None:
        print(f"{time.perf_counter() - self.begin:7.2f} {what}", file=self.trace, flush=True)

    def over(self) -> bool:
        """Whether the time is up, which all ranks must say alike."""
        late = torch.tensor([float(time.perf_counter() - self.begin > self.budget)], device=here())
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def write(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            print(json.dumps(row), flush=True)
            if self.out:
                with open(self.out, "a") as file:
                    file.write(json.dumps(row) + "\n")

    def made(self, name: str, mask: str, make: Callable[[], Any]) -> Any:
        """What `make` gives on every rank; else None, and a row with the error of the first that failed."""
        self.at(f"{mask} {name}")
        error, found = "", None
        try:
            found = make()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"[:600]
            self.at(traceback.format_exc())
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, error)
        if any(said):
            rank = next(r for r, text in enumerate(said) if text)
            self.write({"name": name, "mask": mask, "error": f"rank {rank}: {said[rank]}"})
            return None
        return found


# --- one step -------------------------------------------------------------------------------------------------


SAMPLE_MS = 60.0  # of steps behind each other: the host runs ahead, as in training, where attention is a part of a step


def in_turns(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step on the slowest rank, round by round; each has a sample of some steps in each round."""
    counts = {}
    for name, each in contestants.items():
        milliseconds_of(each, 1)  # warms
        counts[name] = max(1, round(SAMPLE_MS / milliseconds_of(each, 1)))
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, each in contestants.items():
            found[name].append(milliseconds_of(each, counts[name]) / counts[name])
    return found


def milliseconds_of(each: Contestant, count: int) -> float:
    """What `count` steps take on the slowest rank, the same number on every rank."""
    clock: Any = torch.cuda.Event if here().type == "cuda" else _HostClock
    begin, end = (clock(enable_timing=True) for _ in range(2))
    settle()
    dist.barrier()
    begin.record()
    for _ in range(count):
        each.step()
    end.record()
    settle()
    slowest = torch.tensor([begin.elapsed_time(end)], device=here())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def issued_in(each: Contestant, count: int = 4) -> float:
    """Milliseconds of this rank's host for a step: it runs ahead of the GPU if these are fewer than a step takes."""
    settle()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        each.step()
    return (time.perf_counter() - begin) * 1e3 / count


class _HostClock:
    """An event of a CPU, to try a run where there is no GPU."""

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: _HostClock) -> float:
        return (end.time - self.time) * 1e3


def norms_of(grads: tuple[torch.Tensor, ...], alone: bool) -> list[float]:
    """Norms of dQ, dK and dV, of all ranks together."""
    squares = torch.stack([g.float().square().sum() for g in grads])
    if not alone:
        dist.all_reduce(squares)
    return squares.sqrt().tolist()  # type: ignore[no-any-return]


def bytes_of_ranks(number: float) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, int(number))
    return found


def memory_of(case: Case, each: Contestant) -> dict[str, Any]:
    """What a forward, and a forward and a backward, take on each rank, its inputs included."""
    if here().type != "cuda":
        return {}
    inputs = sum(t.numel() * t.element_size() for t in each.leaves)
    found: dict[str, Any] = {}
    for name, run, held in (("forward", each.forward, 0), ("step", each.step, each.grad.nbytes)):
        settle(forget=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made: Any = run()
        settle()
        taken = torch.cuda.max_memory_allocated() - before + inputs + held
        del made
        rows = rows_bytes(case, each, name == "step")
        found[f"{name}_bytes"] = bytes_of_ranks(taken)
        found[f"{name}_rows_bytes"] = bytes_of_ranks(rows)
        found[f"{name}_memory_ratio"] = max(
            a / b for a, b in zip(found[f"{name}_bytes"], found[f"{name}_rows_bytes"], strict=True)
        )
    own = each.leaves[0].shape[2]
    sums = own * case.heads * (HEAD_DIM + 2) * 4
    more = bytes_of_ranks(rows_bytes(case, each, True) + sums)
    found["with_sums_memory_ratio"] = max(a / b for a, b in zip(found["step_bytes"], more, strict=True))
    return found


def rows_bytes(case: Case, each: Contestant, backward: bool) -> int:
    """Bytes of the rank's own rows and of those that it fetches; see the file's head."""
    own, fetched = each.leaves[0].shape[2], 0
    if each.shard is not None and each.shard._last.traffic.method != "heads":
        fetched = each.shard._last.traffic.received[dist.get_rank()] // (case.kv_heads * HEAD_DIM * 4)
    of_q, of_kv, of_lse = case.heads * HEAD_DIM * 2, case.kv_heads * HEAD_DIM * 4, case.heads * 4
    times = 2 if backward else 1
    return own * (times * (2 * of_q + of_kv) + of_lse) + fetched * times * of_kv


def facts_of(shard: Any) -> dict[str, Any]:
    """What was planned, of the attention that ran last."""
    planned = shard._last
    parts = getattr(planned.way, "parts", [])
    return {
        "method": planned.traffic.method, "parts": planned.traffic.parts,
        "received_bytes": list(planned.traffic.received), "imbalance": shard.division.imbalance,
        "runs": shard.division.runs, "pieces": [len(p.part.sub_calls) for p in parts],
        "tables": sum(sub.first is None for p in parts for sub in p.part.sub_calls),
    }  # fmt: skip


# --- rows -----------------------------------------------------------------------------------------------------


def row_of(name: str, case: Case, times: list[float], **more: Any) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "name": name, "mask": case.mask, "seq_len": case.seq_len, "ranks": dist.get_world_size(), "ms": median,
        "least_ms": min(times), "most_ms": max(times), "rounds": len(times),
        "tflops_a_rank": case.flops / median / 1e9 / dist.get_world_size(), **more,
    }  # fmt: skip


def ready(each: Contestant, alone: bool) -> tuple[Contestant, list[float]]:
    """Compiled and run once, with its norms."""
    return each, norms_of(each.step(), alone)


def errors_beside(one: Contestant, several: Contestant) -> list[float]:
    """Relative errors of out, dQ, dK and dV against one GPU's, of the worst rank."""
    with torch.no_grad():
        pairs = [(several.forward(), several.shard.scatter(one.forward(), 2))]
    pairs += [(a, several.shard.scatter(b, 2)) for a, b in zip(several.step(), one.step(), strict=True)]
    worst = torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()  # type: ignore[no-any-return]


def ours(run: Run, case: Case, rounds: int) -> Contestant | None:
    """Rows of this package: one GPU, all of them, all with nothing moved; the second of them."""
    made = {
        "one GPU": run.made("one GPU", case.mask, lambda: ready(one_gpu(case), True)),
        "ours": run.made("ours", case.mask, lambda: ready(several_gpus(case), False)),
        "nothing moved": run.made(
            "nothing moved", case.mask, lambda: ready(several_gpus(case, apart(run.rank, run.size)), False)
        ),
    }
    there = {name: found for name, found in made.items() if found is not None}
    if "ours" not in there or "one GPU" not in there:
        return None
    run.at("in turns")
    times = in_turns({name: each for name, (each, _) in there.items()}, rounds)
    one = statistics.median(times["one GPU"])
    for name, (each, norms) in there.items():
        more: dict[str, Any] = {"norms": norms}
        if name != "one GPU":
            more["scaling"] = one / statistics.median(times[name]) / run.size
        if name == "ours":
            more |= facts_of(each.shard) | {
                "host_ms": issued_in(each),
                "errors_out_dq_dk_dv": errors_beside(there["one GPU"][0], each),
            }
        run.write(row_of(name, case, times[name], **more, **memory_of(case, each)))
    found: Contestant = there["ours"][0]
    return found


def peer(run: Run, name: str, case: Case, beside: Contestant, rounds: int) -> None:
    """A row of a peer, with ours in the same rounds."""
    made = run.made(name, case.mask, lambda: ready(PEERS[name](case), False))
    if made is None:
        return
    each, norms = made
    times = in_turns({name: each, "ours": beside}, rounds)
    mine = statistics.median(times["ours"])
    ratio = statistics.median(times[name]) / mine
    run.write(row_of(name, case, times[name], norms=norms, ours_ms=mine, times_ours=ratio))


def step_of(case: Case, cp: ca.ContextParallel | None) -> None:
    (one_gpu(case) if cp is None else several_gpus(case, cp)).step()


def compile_apart(run: Run, jobs: dict[str, Callable[[], Any]]) -> None:
    """Each rank compiles some of the kernels, by steps on drawn numbers; the others find them on disk."""
    for n, (name, job) in enumerate(jobs.items()):
        if n % run.size == run.rank:
            run.at(f"compiles {name}")
            try:
                job()
            except Exception:
                run.at(traceback.format_exc())
            settle(forget=True)
    dist.barrier()
    run.at("compiled")


def everything(run: Run, seq_len: int, rounds: int, only: set[str] | None) -> None:
    """In order of worth, until the time is up."""
    wanted = {"check", "ours", *PEERS} if only is None else only
    cases = {mask: Case(mask, seq_len) for mask in MASKS}
    held = checks.CHECKS if "check" in wanted else ()
    jobs: dict[str, Callable[[], Any]] = {
        str(check): functools.partial(checks.compiled, run.size, check) for check in held
    }
    for mask, case in cases.items() if "ours" in wanted else ():
        jobs[f"{mask}, one GPU"] = functools.partial(step_of, case, None)
        jobs[f"{mask}, shared"] = functools.partial(step_of, case, apart(1, run.size))
    compile_apart(run, jobs)
    for check in held:
        run.write(checks.held(run, check))
    shared = {mask: ours(run, case, rounds) for mask, case in cases.items() if "ours" in wanted}
    settle(forget=True)
    for name, mask in PEERS_IN_ORDER:
        beside = shared.get(mask)
        if name not in wanted or beside is None:
            continue
        if run.over():
            run.write({"name": name, "mask": mask, "left_out": "the time was up"})
            continue
        peer(run, name, cases[mask], beside, min(rounds, 5))
        settle(forget=True)
    if held:
        checks.one_fails(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"of check, ours, {', '.join(PEERS)}: those, by commas")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no peer begins")
    parser.add_argument("--out", help="a file that rows are appended to, a JSON object each")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(60, repeat=True)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl", device_id=here())
    else:
        dist.init_process_group("gloo")
    run = Run(options.out, options.budget)
    run.at("process group")
    dist.all_reduce(torch.ones(1, device=here()))
    run.at("first reduction")
    run.write({"provenance": provenance(here())})
    everything(run, options.seq_len, options.rounds, None if options.only is None else set(options.only.split(",")))
    run.at("done")
    run.write({"done": True})
    os._exit(0)  # a rank has failed on purpose: the group can't be taken down in order


if __name__ == "__main__":
    main()
