"""Tables and plots from the kept results; `pages.py` writes them between their markers."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.implementations import BARE, DETERMINISTIC, FLOOR, GEMM, OURS, PACKED

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
NOTHING = "No results are kept yet: `make bench` on a machine with a GPU writes them.\n"

SPEED = "speed.svg"
FLEX = "FlexAttention"
COLOURS = {OURS: "#31688e", "torch cuDNN": "#bbbbbb", FLEX: "#35b779", "flash-attn-4": "#d8a03c"}

TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "graph": "Short calls and decode in a CUDA graph",
    "decode": "Decode",
    "halves": "bf16 and fp16",
    "fa3": "Forward beside FlashAttention-3",
    "trained": "Scores as of a trained model",
    "deviation": "Forward, scores that deviate by 2, 3 and 6",
    "wide": "Forward, D above 256",
    "backward-wide": "Backward, D above 256",
    "fixed-order": "Backward in a fixed order",
    "models": "Shapes of models",
    "named": "Shapes and neighbourhoods that a review named",
    "options": "What options cost",
    "trainer": "A small language model in training",
    "host": "What the host takes",
    "host-one-core": "What the host takes, on one core",
    "cold": "First calls",
    "planning": "Planning a mask",
    "memory": "Memory",
    "accuracy": "Errors",
    "cpu-forward": "Forward on a CPU",
}
"""What runs are about, by the name of their file without the H200's."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One result file: where it comes from, and its rows by case and implementation."""

    name: str
    facts: dict[str, Any]

    @property
    def title(self) -> str:
        return TITLES.get(self.name.removeprefix("h200-"), self.name)

    @property
    def anchor(self) -> str:
        """Where links to its section lead, on GitHub and on the site."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")

    @property
    def table(self) -> dict[str, dict[str, Row]]:
        rows: dict[str, dict[str, Row]] = {}
        for row in self.facts["rows"]:
            rows.setdefault(row["row"], {})[row["impl"]] = row
        return rows


def kept() -> list[Result]:
    """Every kept result, newest last."""
    results = [Result(path.stem, json.loads(path.read_text())) for path in RESULTS.glob("*.json")]
    return sorted(results, key=lambda r: (r.facts.get("date", ""), r.name))


def score(row: Row) -> float | None:
    """What a row is compared by, larger is better; None where nothing was measured."""
    for unit in ("tflops", "tbps", "tokens_per_s"):
        if unit in row:
            return float(row[unit])
    for cost in ("ms", "extra_bytes"):
        if row.get(cost):
            return 1.0 / float(row[cost])
    return None


def best_peer(rows: dict[str, Row]) -> tuple[str, float] | None:
    others = {name: row for name, row in rows.items() if not name.startswith(OURS)}
    scores = {name: score(row) for name, row in others.items() if name not in (GEMM, BARE, FLOOR)}
    known = {name: value for name, value in scores.items() if value is not None}
    return max(known.items(), key=lambda pair: pair[1]) if known else None


def ratio_to_best(rows: dict[str, Row], name: str = OURS) -> float | None:
    """Ours, by `name`, over the best peer's, above 1 when we are better."""
    ours = score(rows[name]) if name in rows else None
    peer = best_peer(rows)
    return ours / peer[1] if ours is not None and peer is not None else None


def judged(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """For each shape, by name: its regret, the fastest candidate, and the ratio to the best peer."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["row"] for row in rows):
        times = {row["impl"]: row["ms"] for row in rows if row["row"] == name and "ms" in row}
        if OURS not in times:
            continue
        ours = {impl: ms for impl, ms in times.items() if impl == OURS or impl.startswith(f"{OURS}: ")}
        best = min(ours, key=lambda impl: ours[impl])
        peer = min((ms for impl, ms in times.items() if impl not in ours), default=math.nan)
        found[name] = {
            "regret": times[OURS] / ours[best], "best": best.removeprefix(f"{OURS}: "), "to peer": peer / times[OURS],
            "others": len(ours) - 1,
        }  # fmt: skip
    return found


def fraction_of_gemm(rows: dict[str, Row]) -> float | None:
    ours, yardstick = rows.get(OURS, {}), rows.get(GEMM, {})
    return ours["tflops"] / yardstick["tflops"] if "tflops" in ours and "tflops" in yardstick else None


def errors(rows: dict[str, Row]) -> str:
    """Against fp64, in norm: ours, and the best peer's."""
    peer = best_peer(rows)
    shown = [rows.get(OURS, {}).get("deviation"), rows[peer[0]].get("deviation") if peer else None]
    return ", ".join("–" if error is None else f"{error:.1e}" for error in shown)


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "tflops" in row:
        return f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.3f}"
    if "tbps" in row:
        return f"{row['tbps']:.2f}"
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s'] / 1e3:.0f} k tokens/s"
    if "ms" in row:
        least = f", {row['least_ms'] * 1e3:.1f} at least" if "least_ms" in row else ""
        return f"{row['ms'] * 1e3:.1f} µs{least}"
    if "extra_bytes" in row:
        return f"{row['extra_bytes'] / 2**20:.1f} MiB"
    return "failed" if "error" in row else "–"


def is_measured(row: Row) -> bool:
    return any(row.get(unit) is not None for unit in ("tflops", "tbps", "tokens_per_s", "ms", "extra_bytes"))


def markdown(result: Result) -> str:
    """One table: of planning, of new processes, or a line per case, a column per implementation, ours first."""
    if any("analysed_ms" in row for row in result.facts["rows"]):
        return planning(result)
    if any("forward_s" in row for row in result.facts["rows"]):
        return cold(result)
    if any("rmse" in row for row in result.facts["rows"]):
        return accuracy(result)
    table = result.table
    seen = [name for rows in table.values() for name in rows]
    names = [n for n in (OURS, *dict.fromkeys(seen)) if n in seen and n != "harness"]
    names = [n for n in dict.fromkeys(names) if any(is_measured(rows[n]) for rows in table.values() if n in rows)]
    deviations = any("deviation" in row for row in result.facts["rows"])
    has_product = any(fraction_of_gemm(rows) for rows in table.values())
    head = ["case", *names, "to the best peer"]
    head += ["of the GEMM"] * has_product + ["error, ours and its"] * deviations
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, rows in table.items():
        to_best, packed, of_gemm = ratio_to_best(rows), ratio_to_best(rows, PACKED), fraction_of_gemm(rows)
        ratio = f"{to_best:.2f}×" if to_best else ""
        ends = [f"{ratio}, packed {packed:.2f}×" if packed else ratio]
        ends += [f"{of_gemm:.2f}" if of_gemm else ""] * has_product + [errors(rows)] * deviations
        lines.append("| " + " | ".join([case, *(cell(rows.get(n)) for n in names), *ends]) + " |")
    return "\n".join(lines) + "\n"


def planning(result: Result) -> str:
    """What `benchmarks/planning.py` kept: a line per mask, its length and who plans it."""
    head = ["mask", "S", "planned by", "host, ms", "until the device is done, ms", "kept, MiB", "besides at most, MiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result.facts["rows"]:
        times = (f"{row[name]:.2f}" for name in ("analysed_ms", "done_ms"))
        sizes = ("–" if row[name] is None else f"{row[name] / 2**20:.1f}" for name in ("kept_bytes", "peak_bytes"))
        lines.append("| " + " | ".join([row["row"], f"{row['S']:,}", row["impl"], *times, *sizes]) + " |")
    return "\n".join(lines) + "\n"


def cold(result: Result) -> str:
    """What `benchmarks/cold.py` kept: a line per case and who computes it, seconds of each part."""
    parts = {"import_s": "import, s", "inputs_s": "inputs, s", "forward_s": "forward, s", "backward_s": "backward, s"}
    head = ["new process", "computed by", *parts.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result.facts["rows"]:
        lines.append("| " + " | ".join([row["row"], row["impl"], *(f"{row[part]:.2f}" for part in parts)]) + " |")
    return "\n".join(lines) + "\n"


def accuracy(result: Result) -> str:
    """What `benchmarks/accuracy.py` kept: root mean square errors of each, and ours of the least of the others'."""
    table = result.table
    names = list(dict.fromkeys(name for rows in table.values() for name in rows))
    head = ["inputs", *names, "of the least of the others"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, rows in table.items():
        known = {name: row["rmse"] for name, row in rows.items() if "rmse" in row}
        others = [error for name, error in known.items() if name != OURS]
        ratio = f"{known[OURS] / min(others):.3f}" if OURS in known and others else ""
        errors = (f"{known[name]:.3e}" if name in known else cell(rows.get(name)) for name in names)
        lines.append("| " + " | ".join([case, *errors, ratio]) + " |")
    return "\n".join(lines) + "\n"


def spread(result: Result) -> str:
    """The largest of a row, in words; none where rows say none."""
    known = [row["spread"] for row in result.facts["rows"] if "spread" in row]
    return f" Largest spread of a row: {max(known):.1%}." if known else ""


def elsewhere(result: Result) -> str:
    """Rows of another commit than the file's, in words; none where there are none."""
    of_commits: dict[str, dict[str, None]] = {}
    for row in result.facts["rows"]:
        if "commit" in row:
            of_commits.setdefault(row["commit"], {})[row["row"]] = None
    return "".join(f" Of commit `{commit[:12]}`: {'; '.join(rows)}." for commit, rows in of_commits.items())


def folded(words: str, text: str) -> str:
    """What a reader opens by a click on its words, on GitHub and on the site."""
    return f"<details markdown>\n<summary>{words}</summary>\n\n{text.rstrip()}\n\n</details>\n"


def section(result: Result, plots: Iterable[str]) -> str:
    """Its heading, which links lead to, and all else folded."""
    facts = result.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    failures = [f"- {r['row']}, {r['impl']}: {r['error']}" for r in facts["rows"] if "error" in r]
    parts = [
        f"`results/{result.name}.json`: {facts['machine']}; {versions}; "
        f"commit `{facts['commit'][:12]}`; {facts.get('date', '')}; "
        f"`{facts['command']}`.{spread(result)}{elsewhere(result)}\n",
        *(f"![{name}](plots/{name})\n" for name in plots),
        markdown(result),
    ]
    if failures:
        parts += ["What failed:\n", "\n".join(failures) + "\n"]
    rows = f"{len(result.table)} rows, commit {facts['commit'][:7]}, {facts.get('date', '')}"
    return f"## {result.title}\n\n{folded(rows, chr(10).join(parts))}"


def plot(result: Result, folder: Path) -> list[str]:
    """Two bar charts (ours over the best peer, ours over the GEMM); returns the names of the files drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "composattn"  # the same picture is the same file
    from matplotlib import pyplot as plt

    drawn = []
    quantities = {"best-peer": (ratio_to_best, "ours / best peer"), "gemm": (fraction_of_gemm, "ours / cuBLAS GEMM")}
    for suffix, (value, label) in quantities.items():
        values = {case: value(rows) for case, rows in result.table.items()}
        bars = {case: v for case, v in values.items() if v is not None}
        if not bars:
            continue
        figure, axes = plt.subplots(figsize=(8, 0.6 + 0.28 * len(bars)), layout="constrained")
        axes.barh(list(bars), list(bars.values()), color="#31688e")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{label} ({result.facts['machine'].split(',')[0]})")
        name = f"{result.name}-{suffix}.svg"
        folder.mkdir(parents=True, exist_ok=True)
        keep(figure, folder / name)
        plt.close(figure)
        drawn.append(name)
    return drawn


_DARK = "<style>@media (prefers-color-scheme: dark){svg{filter:invert(.88) hue-rotate(180deg)}}</style>"


def keep(figure: Any, path: Path) -> None:
    """Writes a plot that a reader's browser shows on dark paper where the reader asks for that."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(with_dark_form(path.read_text()))


def with_dark_form(svg: str) -> str:
    """matplotlib writes each colour where it is used: all are turned at once, light into dark, of the same hue."""
    return svg.replace("<defs>", f"<defs>{_DARK}", 1)


SHOWN = "D128 S8192"
"""The rows of the README's plot: one shape, every mask and score mod measured at it."""


def runs_of_gpus(results: list[Result]) -> dict[str, Result]:
    """The newest run of each kind ("forward", "backward", ...) on a GPU."""
    return {r.name.rpartition("-")[2]: r for r in results if "CPU" not in r.facts["machine"]}


def spread_of(ratios: list[float]) -> str:
    return f"median {statistics.median(ratios):.2f}×, from {min(ratios):.2f}× to {max(ratios):.2f}×"


def plot_speed(results: list[Result], folder: Path) -> None:
    """TFLOP/s of each implementation, a group of bars per row of `SHOWN`, forward beside backward."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "composattn"
    from matplotlib import pyplot as plt

    runs = runs_of_gpus(results)
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained", sharex=True)
    for axes, way in zip(panels, ("forward", "backward"), strict=True):
        table = {case.split(SHOWN)[1].strip(): rows for case, rows in runs[way].table.items() if SHOWN in case}
        for number, (name, colour) in enumerate(COLOURS.items()):
            places = [place + (number - 1.5) * 0.2 for place in range(len(table))]
            heights = [rows.get(name, {}).get("tflops", 0) for rows in table.values()]
            axes.barh(places, heights, 0.2, color=colour, label=name)
        axes.set_yticks(range(len(table)), list(table))
        axes.invert_yaxis()
        axes.set_title(f"{way}, D 128, S 8192")
        axes.set_xlabel("TFLOP/s")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    folder.mkdir(parents=True, exist_ok=True)
    keep(figure, folder / SPEED)
    plt.close(figure)


def between(text: str, generated: str, name: str, by: str = "benchmarks/report.py") -> str:
    """`text` with what stands between its markers for `name` replaced; `by` is the script that writes it."""
    begin, end = f"<!-- {name}: generated, see {by} -->", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no markers {begin!r} … {end!r}")
    return pattern.sub(lambda _: f"{begin}\n{generated.rstrip()}\n{end}", text)


def speed_markers(pattern: str) -> str:
    """Where a page wants the speed of a pattern of `benchmarks/cases.py` at `SHOWN`; `with_speeds` writes it there."""
    return f"<!-- speed of {pattern}: generated, see benchmarks/report.py -->\n<!-- speed of {pattern}: end -->"


def with_speeds(text: str, results: list[Result] | None = None) -> str:
    """`text` with what the newest run of each pattern says, where `speed_markers` stand."""
    results = kept() if results is None else results
    for pattern in re.findall(r"<!-- speed of (\w+): end -->", text):
        text = between(text, speed_table(pattern, results), f"speed of {pattern}")
    return text


def speed_table(pattern: str, results: list[Result]) -> str:
    """Both directions of a pattern at `SHOWN`, each from its own run, else the newest that has it; "" where none has.

    But for runs of a fixed order, which have few peers beside.
    """
    lines = []
    for way in ("forward", "backward"):
        case = f"{way} {SHOWN} {pattern}"
        tables = [(r, r.table.get(case, {})) for r in results]
        measured = [(r, rows) for r, rows in tables if "tflops" in rows.get(OURS, {}) and DETERMINISTIC not in rows]
        if not measured:
            continue
        own = [(r, rows) for r, rows in measured if r.name.rpartition("-")[2] == way]
        result, rows = (own or measured)[-1]
        peer = best_peer(rows)
        for name, words in ((OURS, way), (PACKED, f"{way}, packed (`ca.Varlen`)")):
            ratio = ratio_to_best(rows, name)
            if "tflops" in rows.get(name, {}):
                other = f"{cell(rows[peer[0]])} ({peer[0]})" if peer else "–"
                run = f"[{result.title}](benchmarks.md#{result.anchor})"
                line = [words, cell(rows[name]), other, f"{ratio:.2f}×" if ratio else "–", run]
                lines.append("| " + " | ".join(line) + " |")
    head = ["", "composattn", "fastest other", "ours to it", "run"]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) if lines else ""


def newest(kind: str, results: list[Result]) -> str:
    """The table of the newest run of a kind (`MACHINE-KIND.json`), and where it comes from."""
    for result in reversed(results):
        if result.name.rpartition("-")[2] == kind:
            run = f"[{result.title}](benchmarks.md#{result.anchor})"
            return f"{markdown(result)}\nRun {run}: {result.facts['machine'].split(',')[0]}.\n"
    return NOTHING
