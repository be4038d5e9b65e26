"""What benchmarks of one kernel's tilings share: kernels are compiled side by side, and right before they are timed."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.provenance import provenance
from benchmarks.timing import Call


class KernelCase(Protocol):
    """A call, and one way to compute it."""

    @property
    def text(self) -> str:
        """Names the call: cases with the same text are timed in turns."""

    @property
    def name(self) -> str:
        """Names the way."""


Of = TypeVar("Of", bound=KernelCase)
Launched = tuple[Call, Callable[[], float]]
"""A call of a kernel into memory that is there, and how far from right that memory is then."""


def compile_first(work: Callable[[Of], str], cases: Sequence[Of], workers: int) -> None:
    """Does `work` for each case in so many processes and prints what it gives; what one case can't, others may."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for case, said in zip(cases, pool.map(functools.partial(_said, work), cases), strict=True):
            if said:
                print(f"{case.text} {case.name}: {said}", flush=True)


def _said(work: Callable[[Of], str], case: Of) -> str:
    try:
        return work(case)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"


def by_call(cases: Iterable[Of]) -> list[list[Of]]:
    """The cases of each call."""
    groups: dict[str, list[Of]] = {}
    for case in cases:
        groups.setdefault(case.text, []).append(case)
    return list(groups.values())


def right_ones(
    cases: Sequence[Of], launch: Callable[[Of], Launched], wrong_from: float
) -> tuple[dict[str, Call], dict[str, float]]:
    """By name the calls whose error is below `wrong_from`, and all errors; of the others it says why they are none."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    for case in cases:
        try:
            call, error = launch(case)
            call()
            torch.cuda.synchronize()
        except Exception as failed:
            print(f"{case.text} {case.name}: {type(failed).__name__} {str(failed)[-300:]}", flush=True)
            continue
        errors[case.name] = error()
        if errors[case.name] < wrong_from:
            calls[case.name] = call
        else:
            print(f"{case.text} {case.name}: WRONG, relative error {errors[case.name]:.1e}", flush=True)
    return calls, errors


def error_of_rows(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: bool, rows: slice
) -> float:
    """Relative root mean square error of these rows of the first and last head against fp64; `masked`: causal."""
    worst, length = 0.0, q.shape[2]
    for b, h in ((0, 0), (-1, -1)):
        scores = q[b, h, rows].double() @ k[b, h].double().T * q.shape[-1] ** -0.5
        if masked:
            at = torch.arange(length, device=q.device)
            scores = scores.masked_fill(at[None] > at[rows, None], -torch.inf)
        want = torch.softmax(scores, -1) @ v[b, h].double()
        off = out[b, h, rows].double() - want
        worst = max(worst, float((off.square().mean() / want.square().mean()).sqrt()))
    return worst


def save(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Writes rows with where they come from."""
    if out:
        out.write_text(json.dumps({"provenance": provenance(torch.device("cuda")), "rows": rows}, indent=1))
