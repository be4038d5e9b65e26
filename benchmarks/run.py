"""Run cases × implementations and keep the result: check, then time in turns, then write after every case."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):
    # Run as a script, from the source tree, installed or not.
    sys.path[0] = str(ROOT)

from benchmarks import trained_scores  # noqa: E402
from benchmarks.cases import SETS, Case, select  # noqa: E402
from benchmarks.check import Checker  # noqa: E402
from benchmarks.implementations import (  # noqa: E402
    GEMM,
    GEMM_SIZE,
    OURS,
    Implementation,
    Inputs,
    Job,
    NotServed,
    available,
    gemm,
)
from benchmarks.provenance import provenance  # noqa: E402
from benchmarks.timing import (  # noqa: E402
    Call,
    Stopwatch,
    Timing,
    captured,
    host_stopwatch,
    interleaved,
    peak_extra_bytes,
    time_limit,
)
from composattn.backends.fused.tiles.architecture import ARCHITECTURES  # noqa: E402
from composattn.backends.fused.tiles.target import TARGETS, Target  # noqa: E402
from composattn.errors import BackendUnavailable  # noqa: E402

Row = dict[str, Any]


class DeviceLost(Exception):
    """A kernel broke the device's context: nothing that follows could be trusted."""


def draw(case: Case, device: torch.device) -> Inputs:
    def tensor(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, length, dim, device=device).to(case.dtype)

    q, k = tensor(case.heads, case.q_len, case.dim) * case.deviation, tensor(case.kv_heads, case.kv_len, case.dim)
    if case.trained:
        trained_scores.drawn(q, k, trained_scores.heads())
    v = k[..., : case.v_dim] if case.latent else tensor(case.kv_heads, case.kv_len, case.v_dim)
    return Inputs(q, k, v, tensor(case.heads, case.q_len, case.v_dim))


def checked_call(case: Case, job: Job, checker: Checker) -> tuple[Call, float]:
    """What is timed, once its result was found right, and the error found."""
    if case.direction == "forward":
        with torch.no_grad():
            error = checker.check_output(job.to_common(job.forward(*job.leaves)))
        return functools.partial(job.forward, *job.leaves), error

    out = job.forward(*job.leaves)
    checker.check_output(job.to_common(out))

    leaves = (*job.leaves, *job.learned)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, job.grad, retain_graph=True)

    return backward, checker.check_gradients(*(job.to_common(g) for g in backward()[:3]))


def error_row(case: Case, name: str, error: BaseException) -> Row:
    lines = str(error).strip().splitlines()
    kind = "not served" if isinstance(error, NotServed) else "error"
    return {"row": case.name, "impl": name, kind: f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}


def result_row(case: Case, name: str, timing: Timing, visible: int, error: float | None) -> Row:
    row: Row = {"row": case.name, "impl": name, "ms": timing.ms}
    if case.measure == "tflops":
        row["tflops"] = (2 * GEMM_SIZE**3 if name == GEMM else case.flops(visible)) / timing.ms * 1e-9
    elif case.measure == "tbps":
        row["tbps"] = case.kv_bytes() / timing.ms * 1e-9
    row["spread"] = timing.spread
    return row if error is None else row | {"deviation": error}


def make_ready(
    case: Case, implementations: Sequence[Implementation], device: torch.device, limit_s: float
) -> tuple[dict[str, Call], dict[str, float], list[Row], int]:
    """The checked calls of a case with their errors, a row for each implementation that has none, visible pairs."""
    pattern = case.pattern(case, device)
    inputs = draw(case, device)
    checker = Checker(case, pattern, inputs)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    failed: list[Row] = []
    for implementation in implementations:
        name = implementation.name
        try:
            with time_limit(limit_s):
                calls[name], errors[name] = checked_call(case, implementation.prepare(case, pattern, inputs), checker)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # compilers raise what they like; one peer's failure is one row
            failed.append(error_row(case, name, error))
            print(f"    {name}: {failed[-1].get('error') or failed[-1].get('not served')}", flush=True)
        device_alive(device)
    return calls, errors, failed, case.visible_pairs(pattern, device)


def in_graphs(case: Case, calls: dict[str, Call]) -> tuple[dict[str, Call], list[Row]]:
    """Each call as the replay of its CUDA graph, and a row for each that can't be captured."""
    found: dict[str, Call] = {}
    failed: list[Row] = []
    for name, call in calls.items():
        try:
            found[name] = captured(call)
        except Exception as error:  # peers raise what they like
            failed.append(error_row(case, name, error))
    return found, failed


def device_alive(device: torch.device) -> None:
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error).splitlines()[0]) from error


def memory_rows(case: Case, calls: dict[str, Call]) -> list[Row]:
    """Bytes beyond inputs and output."""
    rows = []
    for name, call in calls.items():
        output = call()
        size = output.nbytes if isinstance(output, torch.Tensor) else 0
        del output
        rows.append({"row": case.name, "impl": name, "extra_bytes": peak_extra_bytes(call) - size})
    return rows


def run_case(
    case: Case,
    implementations: Sequence[Implementation],
    device: torch.device,
    beside: dict[str, Call],
    options: argparse.Namespace,
) -> list[Row]:
    """Rows of all implementations, timed in turns, and what else is timed `beside` where rows are of TFLOP/s."""
    if case.measure == "memory" and device.type != "cuda":
        raise NotServed("peak memory is read from the allocator of a GPU")
    calls, errors, rows, visible = make_ready(case, implementations, device, options.limit)
    if not calls:
        return rows
    if case.measure == "memory":
        with torch.no_grad():
            return memory_rows(case, calls) + rows
    if case.measure == "tflops":
        calls |= beside
    stopwatch = host_stopwatch if case.measure == "host" else Stopwatch(device)
    if case.in_graph and device.type == "cuda":
        calls, refused = in_graphs(case, calls)
        rows += refused
    with torch.set_grad_enabled(case.direction == "backward"):
        timings = interleaved(calls, stopwatch, rounds=options.rounds, limit_s=options.limit)
    for name, timing in timings.items():
        rows.append(result_row(case, name, timing, visible, errors.get(name)))
    return rows


def show(rows: Sequence[Row]) -> None:
    for row in rows:
        if "ms" in row:
            rate = next((f"{row[unit]:9.1f} {unit}" for unit in ("tflops", "tbps") if unit in row), " " * 16)
            print(
                f"    {row['impl']:18} {row['ms']:10.4f} ms {rate}   spread {row['spread']:.1%}"
                f"   error {row.get('deviation', math.nan):.1e}",
                flush=True,
            )
        elif "extra_bytes" in row:
            print(f"    {row['impl']:18} {row['extra_bytes'] / 2**20:10.2f} MiB extra", flush=True)


def run(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """All cases on the best device there is; returns the result and keeps it in options.out as it grows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built = {"kernels": f"as for {options.arch}"} if options.arch else {}
    result: dict[str, Any] = {**provenance(device), **built, "rows": []}
    print(f"{result['machine']}; commit {result['commit'][:12]}; {len(cases)} cases", flush=True)
    implementations = [i for i in available(device, options.backend) if i.name in (options.impl or [i.name])]
    beside: dict[str, Call] = {}
    if device.type == "cuda" and GEMM in (options.impl or [GEMM]):
        beside[GEMM] = gemm(device)
    start = time.monotonic()
    for number, case in enumerate(cases, start=1):
        if time.monotonic() - start > options.budget:
            print(f"budget of {options.budget:g} s is spent: {len(cases) - number + 1} cases left out", flush=True)
            break
        print(f"[{number}/{len(cases)}, {time.monotonic() - start:.0f} s] {case.name}", flush=True)
        # A compiler that hangs outside Python can't be interrupted; what is written so far stays.
        faulthandler.dump_traceback_later(options.limit * (len(implementations) + 2), exit=True)
        try:
            rows = run_case(case, implementations, device, beside, options)
        except DeviceLost as error:
            rows = [error_row(case, OURS, error)]
            result["rows"] += rows
            print(f"    device lost, stopping: {error}", flush=True)
            break
        except Exception as error:  # the truth did not fit into memory, say: the other cases still run
            rows = [error_row(case, "harness", error)]
            print(f"    {rows[0].get('error') or rows[0].get('not served')}", flush=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
            save(result, options.out)
        result["rows"] += rows
        show(rows)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    save(result, options.out)
    return result


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    made.add_argument("--set", dest="sets", nargs="+", choices=[*SETS, "all"], help="default: core, or smoke on a CPU")
    made.add_argument("--only", help="regular expression on the case's name")
    made.add_argument("--impl", nargs="+", help="only these implementations, by name")
    made.add_argument("--backend", help="backend of our rows; default: what ca.attention picks")
    made.add_argument("--as", dest="arch", choices=[t.arch for t in TARGETS.values()],
                      help="the kernels of this GPU, built for a newer one that is there")  # fmt: skip
    made.add_argument("--rounds", type=int, default=15, help="interleaved rounds a case (at least 4)")
    made.add_argument("--limit", type=float, default=120.0, help="seconds for one implementation of one case")
    made.add_argument("--budget", type=float, default=3600.0, help="seconds after which no case is begun")
    made.add_argument("--out", type=Path, help="result file; default: benchmarks/results/ on a GPU, none on a CPU")
    made.add_argument("--list", action="store_true", help="print the cases and stop")
    made.add_argument("--report", action="store_true", help="write tables and plots of the kept results, run nothing")
    return made


def backend_as(arch: str, device: torch.device) -> str:
    """The backend that has the kernels of `arch`, which from now on are planned as for it and built for `device`.

    Raises: `BackendUnavailable` where they don't run there.
    """
    if device.type != "cuda":
        raise BackendUnavailable(f"--as {arch} times kernels, and there is no GPU here; run it on a newer one")
    target, here = next(target for target in TARGETS.values() if target.arch == arch), Target.of(device)
    if here.backend == target.backend and here.arch != arch:
        raise BackendUnavailable(f"{here.gpu} has {target.backend}'s kernels for {here.arch}; leave --as out")
    found = ARCHITECTURES[target.backend]
    if found.elsewhere is None:
        able = ", ".join(name for name, other in ARCHITECTURES.items() if other.elsewhere is not None)
        raise BackendUnavailable(
            f"kernels for {target.arch} run on no GPU but those of {found.name}; those of {able} are built for newer "
            "ones too"
        )
    ARCHITECTURES[found.name] = dataclasses.replace(found, elsewhere=target)
    return found.name


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.report:
        from benchmarks.pages import write

        write()
        return 0
    on_gpu = torch.cuda.is_available()
    cases = select(options.sets or (["core"] if on_gpu else ["smoke"]), options.only)
    if options.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has such a name")
        return 0 if cases else 2
    if options.arch is not None:
        try:
            options.backend = backend_as(options.arch, torch.device("cuda" if on_gpu else "cpu"))
        except BackendUnavailable as refusal:
            print(f"BackendUnavailable: {refusal}", file=sys.stderr)
            return 2
    if options.out is None and on_gpu:
        chip = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
        chip += f"-as-{options.arch}" if options.arch else ""
        options.out = ROOT / "benchmarks" / "results" / f"{chip}-{'-'.join(options.sets or ['core'])}.json"
    torch.manual_seed(int(time.time()))
    result = run(cases, options)
    ours = [row for row in result["rows"] if row["impl"] in (OURS, "harness")]
    failed = [row for row in ours if "error" in row]
    if options.out is not None:
        print(f"kept in {options.out}")
    print(f"{len(ours) - len(failed)} of {len(ours)} rows of ours measured")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
