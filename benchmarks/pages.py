"""The pages that say what the kept results say: what each must be, which are stale, and how they are written."""

from __future__ import annotations

from pathlib import Path

from benchmarks import byte_bounds, context_parallel_report
from benchmarks.claims import headline, sweeps, why
from benchmarks.report import (
    NOTHING,
    PLOTS,
    ROOT,
    Result,
    between,
    kept,
    newest,
    plot,
    plot_speed,
    section,
    with_speeds,
)
from benchmarks.summary import summary

PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
GALLERY = ROOT / "docs" / "gallery.md"
MORE = ROOT / "docs" / "more.md"
PARALLEL = ROOT / "docs" / "parallel.md"
EIGHT_BITS = ROOT / "docs" / "eight_bits.md"


def pages(results: list[Result], plots: dict[str, list[str]]) -> dict[Path, str]:
    """What the pages must say, given the results and the names of their plots."""
    sections = [section(r, plots.get(r.name, [])) for r in reversed(results)]
    return {
        PAGE: between(
            between(PAGE.read_text(), summary(results) or NOTHING, "summary"), "\n".join(sections) or NOTHING, "results"
        ),
        README: between(
            between(README.read_text(), headline(results, sweeps()) or NOTHING, "results"),
            why(results) or NOTHING,
            "why",
        ),
        GALLERY: with_speeds(GALLERY.read_text(), results),
        MORE: between(MORE.read_text(), newest("planning", results), "planning"),
        PARALLEL: between(PARALLEL.read_text(), context_parallel_report.all_kept(), "results"),
        EIGHT_BITS: between(EIGHT_BITS.read_text(), byte_bounds.table(), "bounds"),
    }


def plots_there(results: list[Result]) -> dict[str, list[str]]:
    return {r.name: [f"{r.name}-{s}.svg" for s in ("best-peer", "gemm") if (PLOTS / f"{r.name}-{s}.svg").exists()]
            for r in results}  # fmt: skip


def stale() -> list[Path]:
    """The pages that do not say what the kept results say."""
    results = kept()
    return [path for path, text in pages(results, plots_there(results)).items() if path.read_text() != text]


def write() -> None:
    results = kept()
    plots = {result.name: plot(result, PLOTS) for result in results}
    if headline(results, {}):
        plot_speed(results, PLOTS)
    for path, text in pages(results, plots).items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
