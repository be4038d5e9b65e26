"""The benchmark harness: it counts right, refuses wrong results, takes turns, and the pages say what was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import (
    accuracy,
    claims,
    cold,
    context_parallel_report,
    pages,
    planning,
    report,
    run,
    shapes,
    summary,
    timing,
    trained_scores,
)
from benchmarks.cases import CASES, Case, Direction, alibi, causal, documents, full, prefix, select, window
from benchmarks.check import Checker, WrongResult
from benchmarks.implementations import GEMM, OURS, Inputs, TorchSdpa, interval_ends
from benchmarks.shapes import COUNTS

CPU = torch.device("cpu")
SMALL = Case("small", (), causal, batch=2, heads=4, kv_heads=2, q_len=96, dim=16, dtype=torch.float32)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        (full, 96 * 96),
        (causal, 96 * 97 // 2),
        (prefix, 96 * 97 // 2 + 24 * 23 // 2),
        (lambda c, d: window(c, d, width=10), 96 * 10 - 45),
    ],
    ids=["full", "causal", "prefix", "window"],
)
def test_visible_pairs_are_counted_exactly(pattern, pairs: int) -> None:
    case = dataclasses.replace(SMALL, pattern=pattern)
    assert case.visible_pairs(pattern(case, CPU), CPU) == case.batch * case.heads * pairs


def test_documents_tell_peers_the_same_as_the_mask_says() -> None:
    case = dataclasses.replace(SMALL, pattern=documents, batch=1, heads=1)
    pattern = documents(case, CPU)
    lengths = torch.tensor(pattern.document_starts).diff()
    assert case.visible_pairs(pattern, CPU) == int((lengths * (lengths + 1) // 2).sum())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_result_is_not_timed(direction) -> None:
    torch.manual_seed(0)  # it is torch that is checked, whose fp32 gradient may miss the tolerance on some inputs
    case = dataclasses.replace(SMALL, direction=direction)
    pattern = causal(case, CPU)
    inputs = run.draw(case, CPU)
    checker = Checker(case, pattern, inputs)
    job = TorchSdpa("torch sdpa", None).prepare(case, pattern, inputs)
    run.checked_call(case, job, checker)
    off_by_a_scale = dataclasses.replace(job, forward=lambda *tensors: job.forward(*tensors) * 1.001)
    with pytest.raises(WrongResult):
        run.checked_call(case, off_by_a_scale, checker)
    if direction == "backward":
        wrong_gradient = dataclasses.replace(job, grad=job.grad * 1.001)
        with pytest.raises(WrongResult, match="dQ"):
            run.checked_call(case, wrong_gradient, checker)


@pytest.mark.parametrize(("dtype", "orders"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_fp32_is_held_to_two_orders_of_its_sums(dtype: torch.dtype, orders: int) -> None:
    case = dataclasses.replace(SMALL, pattern=alibi, direction="backward", dtype=dtype)
    checker = Checker(case, alibi(case, CPU), run.draw(case, CPU))
    assert checker.gradients is not None
    for expected in (checker.output, *checker.gradients[2]):
        assert len({plain.double().sum().item() for plain in expected.baselines}) == len(expected.baselines) == orders
        for plain in expected.baselines:
            torch.testing.assert_close(plain.double(), expected.truth, atol=16 * torch.finfo(dtype).eps, rtol=0.05)


def test_the_check_has_score_mods_and_gqa() -> None:
    case = dataclasses.replace(SMALL, pattern=alibi, direction="backward")
    pattern = alibi(case, CPU)
    inputs = run.draw(case, CPU)
    leaves = [t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves[0], *(t.repeat_interleave(2, dim=1) for t in leaves[1:])
    position = torch.arange(case.q_len)
    slopes = 2.0 ** (-8.0 * torch.arange(1, 5) / 4)
    distance = position[:, None] - position
    scores = q @ k.mT / case.dim**0.5 - slopes[:, None, None] * distance
    out = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ v
    checker = Checker(case, pattern, inputs)
    checker.check_output(out)
    checker.check_gradients(*torch.autograd.grad(out, leaves, inputs.grad.double()))


def test_scores_that_are_drawn_lie_as_the_heads_of_the_trained_model_do() -> None:
    known = trained_scores.heads()
    assert len(known) == 54 and max(lead for _, lead in known) > 15
    q, k = (torch.randn(1, heads, 4096, 64, generator=torch.Generator().manual_seed(0)) for heads in (8, 2))
    trained_scores.drawn(q, k, known)
    rows = torch.arange(1000, 4096, 97)
    for head in range(8):
        scores = q[0, head, rows] @ k[0, head // 4].T / 8
        deviation, lead = trained_scores.of_rows(scores, rows)
        wanted = known[head * trained_scores.STEP % 54]
        assert (deviation, lead) == pytest.approx(wanted, rel=0.05, abs=0.05)


def test_an_error_is_the_deviation_of_all_elements_from_fp64() -> None:
    class Shifted:
        name = "shifted"

        def prepare(self, case, pattern, inputs: Inputs):
            job = TorchSdpa("torch sdpa", None).prepare(case, pattern, inputs)
            return dataclasses.replace(job, forward=lambda *tensors: job.forward(*tensors) + 0.01)

    for draw in accuracy.DRAWS:
        exact, shifted = accuracy.rows_of(SMALL, draw, [TorchSdpa("torch sdpa", None), Shifted()], 2, CPU)
        assert exact["row"] == shifted["row"] == f"small, {draw.name}"
        assert exact["rmse"] < 1e-6 and shifted["rmse"] == pytest.approx(0.01, rel=1e-3)
    table = report.markdown(report.Result("a-chip", {"rows": [exact, {**shifted, "impl": OURS}]}))
    assert float(table.split("|")[-2]) == pytest.approx(shifted["rmse"] / exact["rmse"], rel=1e-3)


@pytest.mark.parametrize("fails_at", [0, 1])
def test_who_fails_on_a_draw_has_a_row_that_says_so_and_no_error(fails_at: int) -> None:
    class Failing:
        name, draws = "failing", 0

        def prepare(self, case, pattern, inputs: Inputs):
            self.draws += 1
            if self.draws > fails_at:
                raise AssertionError("deep inside\na compiler")
            return TorchSdpa("torch sdpa", None).prepare(case, pattern, inputs)

    class NotFinite(TorchSdpa):
        def prepare(self, case, pattern, inputs: Inputs):
            job = super().prepare(case, pattern, inputs)
            return dataclasses.replace(job, forward=lambda *tensors: job.forward(*tensors) * torch.nan)

    who = [TorchSdpa("torch sdpa", None), Failing(), NotFinite("not finite", None)]
    right, *wrong = accuracy.rows_of(SMALL, accuracy.DRAWS[0], who, 2, CPU)
    assert right["row"] == "small, outliers" and len(right["of_seeds"]) == 2
    assert [(row["row"], row["impl"], row["error"]) for row in wrong] == [
        ("small, outliers", "failing", "AssertionError: deep inside"),
        ("small, outliers", "not finite", "WrongResult: output: not finite"),
    ]
    table = report.markdown(report.Result("a-chip", {"rows": [right, *wrong]}))
    assert table.count("failed") == 2


def test_outliers_are_as_many_and_as_large_as_they_are_said_to_be() -> None:
    drawn = accuracy.DRAWS[0]((1000, 1000), torch.Generator().manual_seed(0))
    assert drawn.std() ** 2 == pytest.approx(1 + accuracy.SHARE * accuracy.SIZE**2, rel=0.02)
    assert (drawn.abs() > 6).double().mean() == pytest.approx(accuracy.SHARE * 0.55, rel=0.1)


def test_implementations_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    clock = {"a": 1.0, "b": 2.0, "c": 4.0}

    def stopwatch(call, count):
        call()
        return clock[order[-1]] * count

    timings = timing.interleaved(calls, stopwatch, rounds=4, sample_ms=1.0)
    assert ["".join(order[-12:][n : n + 3]) for n in (0, 3, 6, 9)] == ["abc", "bca", "cab", "cba"]
    assert {name: t.ms for name, t in timings.items()} == clock


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_each_implementation_follows_each_other_one_equally_often(count: int) -> None:
    names = [str(n) for n in range(count)]
    orders = timing.balanced_orders(names)
    assert all(sorted(order) == names for order in orders)
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(behind) == set(itertools.permutations(names, 2)) and len(set(behind.values())) == 1


def test_a_time_limit_stops_the_body() -> None:
    with pytest.raises(TimeoutError, match=r"0\.05"), timing.time_limit(0.05):
        while True:
            pass


def test_a_run_keeps_what_it_measured_and_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = run.parser().parse_args(["--impl", "torch sdpa", "--rounds", "4", "--out", str(out)])
    run.run(select(["smoke"], "forward (causal|alibi)"), options)
    kept = json.loads(out.read_text())
    assert {"machine", "versions", "commit", "command", "rows"} <= set(kept)
    measured, refused = kept["rows"]
    assert set(measured) == {"row", "impl", "ms", "tflops", "spread", "deviation"}
    assert 0 < measured["deviation"] < 1e-5
    assert refused["row"] == "smoke forward alibi"
    assert "not served" in refused


def test_a_failing_implementation_is_a_row() -> None:
    class Broken:
        name = "broken"

        def prepare(self, case, pattern, inputs: Inputs):
            raise AssertionError("deep inside\na compiler")

    calls, _, rows, _ = run.make_ready(SMALL, [Broken()], CPU, limit_s=60)
    assert calls == {}
    assert rows == [{"row": "small", "impl": "broken", "error": "AssertionError: deep inside"}]


def test_a_matrix_product_beside_has_flops_of_its_own() -> None:
    second = timing.Timing(1e3, 0.0, 1e3)
    assert run.result_row(SMALL, GEMM, second, 7, None)["tflops"] == pytest.approx(2 * 8192**3 * 1e-12)
    assert run.result_row(SMALL, OURS, second, 7, None)["tflops"] == pytest.approx(SMALL.flops(7) * 1e-12)


def test_ratios_compare_with_the_best_peer_and_the_gemm() -> None:
    rows = {
        "composattn": {"tflops": 600.0, "ms": 1.0},
        "slow": {"tflops": 300.0, "ms": 2.0},
        "fast": {"tflops": 800.0, "ms": 0.75},
        "broken": {"error": "x"},
        GEMM: {"tflops": 1000.0, "ms": 3.0},
    }
    assert report.ratio_to_best(rows) == pytest.approx(0.75)
    assert report.fraction_of_gemm(rows) == pytest.approx(0.6)
    host = {"composattn": {"ms": 0.02}, "peer": {"ms": 0.05}}
    assert report.ratio_to_best(host) == pytest.approx(2.5)


def test_the_readme_counts_every_row_the_slower_ones_too() -> None:
    def run_of(way: str, *peers: float) -> report.Result:
        rows = [{"row": f"{way} {n}", "impl": "composattn", "tflops": 100.0} for n in range(len(peers))]
        rows += [{"row": f"{way} {n}", "impl": "FlexAttention", "tflops": speed} for n, speed in enumerate(peers)]
        rows += [{"row": f"{way} {n}", "impl": GEMM, "tflops": 200.0} for n in range(len(peers))]
        return report.Result(f"chip-{way}", {"machine": "one chip, 1 SM", "rows": rows})

    said = claims.headline([run_of("forward", 50.0, 200.0, 80.0), run_of("backward", 125.0)], {})
    assert "forward, to the fastest other of each row: median 1.25×, from 0.50× to 2.00×" in said
    assert "slower in 1 of 3 rows" in said and "slower in 1 of 1 rows" in said
    assert "cuBLAS matrix product: median 0.50×" in said
    assert "both directions, 4 rows: median 1.02×, from 0.50× to 2.00×" in said
    assert claims.headline([run_of("forward", 50.0)], {}) == ""
    apart = claims.headline([run_of("forward", 50.0), run_of("backward", 125.0), run_of("deviation", 125.0)], {})
    assert "forward of scores that deviate by 2 to 6, to the fastest other of each row: median 0.80×" in apart
    newer = report.Result("cpu-forward", run_of("forward", 1.0).facts | {"machine": "x86_64 CPU, 1 threads"})
    assert claims.headline([run_of("forward", 50.0, 200.0, 80.0), run_of("backward", 125.0), newer], {}) == said


def test_a_row_is_compared_with_the_fastest_other_of_all_runs_that_have_it() -> None:
    def run_of(kind: str, peer: str, speed: float, row: str = "forward 0") -> report.Result:
        rows = [{"row": row, "impl": OURS, "tflops": 100.0}, {"row": row, "impl": peer, "tflops": speed}]
        return report.Result(f"chip-{kind}", {"machine": "one chip, 1 SM", "rows": rows})

    runs = [run_of("forward", "flash-attn-4", 50.0), run_of("backward", "FlexAttention", 50.0, "backward 0")]
    apart = run_of("fa3", "flash-attn-3", 80.0)
    said = claims.headline([*runs, apart], {})
    assert "forward, to the fastest other of each row: median 1.25×" in said
    assert "for it: FlashAttention-3, flash-attn-4 and compiled FlexAttention." in said
    elsewhere = run_of("fa3", "flash-attn-3", 80.0, "forward of another shape")
    assert "forward, to the fastest other of each row: median 2.00×" in claims.headline([*runs, elsewhere], {})


def test_scores_of_a_trained_model_stand_beside_the_same_rows_of_draws() -> None:
    def rows_of(row: str, peer: float) -> list[dict[str, object]]:
        return [{"row": row, "impl": OURS, "tflops": 100.0}, {"row": row, "impl": "peer", "tflops": peer}]

    rows = [*rows_of(f"{claims.TRAINED}forward 1", 125.0), *rows_of("forward 1", 50.0), *rows_of("forward 2", 1.0)]
    first, second = claims.of_trained(report.Result("chip-trained", {"rows": rows}))
    assert first.endswith("forward: median 0.80×, from 0.80× to 0.80×;")
    assert "slower in 1 of 1 rows." in second and "in the same turns: median 2.00×" in second


@pytest.mark.parametrize("direction", COUNTS)
def test_a_seed_draws_shapes_of_no_part_and_a_name_says_all_of_a_shape(direction: Direction) -> None:
    fresh = shapes.drawn(direction, "unseen", seed=11)
    assert len(fresh) == COUNTS[direction]
    assert not {case.name for case in fresh} & {case.name for case in shapes.every_shape()}
    for case in fresh:
        found = shapes.shape_named(case.name)
        assert dataclasses.replace(found, pattern=case.pattern) == case
        said, meant = (functools.partial(shape.pattern) for shape in (found, case))
        assert (said.func, said.keywords) == (meant.func, meant.keywords)
    with pytest.raises(ValueError, match="names are as 'forward LLaMA 3 8B: B"):
        shapes.shape_named("forward D128 S8192 full")


def test_drawn_shapes_are_counted_by_their_fastest_other() -> None:
    rows = [{"row": "a", "impl": OURS, "ms": 1.0}, {"row": "a", "impl": "peer", "ms": 2.0}]
    rows += [{"row": "b", "impl": OURS, "ms": 2.0}, {"row": "b", "impl": "peer", "ms": 1.0}]
    first, second = claims.of_shapes({"forward": rows})
    assert "half drawn: median 1.25×, from 0.50× to 2.00×" in first
    assert "slower in 1 of 2 rows. Geometric mean 1.00×." in second


def test_the_first_table_of_the_page_counts_slower_rows_and_links_to_all_rows_of_a_run() -> None:
    rows = [{"row": f"forward {n}", "impl": OURS, "tflops": 100.0} for n in range(3)]
    rows += [{"row": f"forward {n}", "impl": "peer", "tflops": speed} for n, speed in enumerate((50.0, 200.0, 80.0))]
    made = report.Result("h200-forward", {"machine": "one chip, 1 SM", "rows": rows})
    *_, line = summary.to_peers([made]).splitlines()
    assert line == "| [Forward](#forward) | 3 | 1 | 1.25× | 0.50× | 2.00× |"
    assert summary.summary([made]) == "", "no table of a direction that no run has"


def test_sections_of_runs_are_called_by_what_they_are_about_each_by_its_own() -> None:
    titles = [result.title for result in report.kept()]
    assert "Backward in a fixed order" in titles and len(set(titles)) == len(titles)
    assert not [title for title in titles if title.startswith(("h200-", "cpu-"))], "a line in TITLES"


def test_a_row_that_failed_is_beside_no_peer_in_the_table_of_one_shape() -> None:
    def run_of(way: str, *rows: dict[str, object]) -> report.Result:
        made = [{"row": f"{way} {report.SHOWN} causal"} | row for row in rows]
        return report.Result(f"chip-{way}", {"machine": "one chip, 1 SM", "rows": made})

    forward = run_of("forward", {"impl": OURS, "tflops": 600.0}, {"impl": "peer", "tflops": 500.0})
    backward = run_of("backward", {"impl": OURS, "tflops": 400.0}, {"impl": "peer", "error": "no"})
    *_, line = summary.speeds([forward, backward]).splitlines()
    assert line == "| causal | 600 | 500, peer | 400 | – |"


def test_planning_has_a_table_of_its_own_a_line_a_mask() -> None:
    row = planning.measure(planning.Row("window", 1 << 12, planning.windows), CPU, repeats=2)
    kept = report.Result("a-planning", {"rows": [row, {**row, "impl": "peer", "done_ms": 5.0, "peak_bytes": 3 << 20}]})
    *_, ours, peers = report.markdown(kept).splitlines()
    assert ours.startswith("| window | 4,096 | composattn | ") and ours.endswith("| 0.0 | – |")
    assert "| peer | " in peers and peers.endswith(" | 5.00 | 0.0 | 3.0 |")


SHORT = cold.Size(1, 4, 2, 256)


def test_a_new_process_says_what_it_waited_for(tmp_path: Path) -> None:
    caches = [tmp_path / case.name for case in cold.CASES]
    for found in cold.a_round(cold.CASES, "composattn", SHORT, "cpu", caches):
        assert tuple(found) == (*cold.PARTS, *cold.BESIDE, "kernels")
        assert all(found[part] > 0 for part in cold.PARTS)


@pytest.mark.slow
def test_cases_by_warps_are_calls(tmp_path: Path) -> None:
    anywhere = [cold.Case(c.name, c.ours.replace('backend="warp"', "backend=None"), dim=32) for c in cold.BY_WARPS]
    assert all("backend=None" in case.ours for case in anywhere)
    anywhere = list({case.ours: case for case in anywhere}.values())
    found = cold.a_round(anywhere, "composattn", SHORT, "cpu", [tmp_path] * len(anywhere))
    assert len(found) == len(anywhere) == 4


def test_no_process_begins_too_late(tmp_path: Path) -> None:
    assert cold.a_round(cold.CASES[:1], "composattn", SHORT, "cpu", [tmp_path], time.time() - 1) == []


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    broken = cold.Case("broken", "mask_mod=causal")
    with pytest.raises(RuntimeError, match=r"composattn, broken: .*WrongComposition"):
        cold.a_round([broken], "composattn", SHORT, "cpu", [tmp_path])


def test_new_processes_have_a_table_of_their_own() -> None:
    row = {"row": "causal, nothing warm", "impl": "composattn"}
    seconds = {f"{part}_s": 1.0 + n for n, part in enumerate(cold.PARTS)}
    *_, line = report.markdown(report.Result("a-cold", {"rows": [row | seconds]})).splitlines()
    assert line == "| causal, nothing warm | composattn | 2.00 | 3.00 | 4.00 | 5.00 |"


def test_the_pages_say_what_the_kept_results_say() -> None:
    assert pages.stale() == [], "run: python benchmarks/run.py --report"


@pytest.mark.parametrize("pattern", [full, causal, window, prefix, documents])
def test_interval_ends_say_what_the_mask_says(pattern) -> None:
    case = dataclasses.replace(SMALL, pattern=pattern, q_len=300, kv_len=300)
    made = pattern(case, CPU)
    ends = interval_ends(case, made, CPU)
    assert ends.shape[0] % 2 == 1 and ends.dtype == torch.int32
    q, kv = torch.arange(300)[:, None], torch.arange(300)
    seen = kv < ends[0, :, None]
    for begin, stop in zip(ends[1::2], ends[2::2], strict=True):
        seen = seen | ((kv >= begin[:, None]) & (kv < stop[:, None]))
    zero = torch.zeros((), dtype=torch.int64)
    wanted = torch.ones(300, 300, dtype=torch.bool) if made.mask_mod is None else made.mask_mod(zero, zero, q, kv)
    assert torch.equal(seen, wanted.expand(300, 300))


def test_ranks_that_share_a_sequence_have_tables_of_their_own() -> None:
    one = {"name": "one GPU", "mask": "causal", "ms": 800.0, "ranks": 4}
    held = {"step_bytes": [3 << 20, 5 << 20], "forward_bytes": [1 << 20, 2 << 20], "step_memory_ratio": 1.25,
            "forward_memory_ratio": 1.5, "with_sums_memory_ratio": 1.125}  # fmt: skip
    ours = {"name": "ours", "mask": "causal", "ms": 250.0, "scaling": 0.8, **held}
    peers = [
        {"name": "fa4 gathered", "mask": "causal", "ms": 300.0, "times_ours": 1.2},
        {"name": "torch ring", "mask": "causal", "error": "rank 0: RuntimeError: no"},
        {"name": "torch flex", "mask": "causal", "left_out": "the time was up"},
    ]
    check = {"check": "causal", "errors": [0.001], "deterministic": True, "same_bits": False, "ok_on_all": False}
    facts = {"machine": "one chip, 132 SMs", "commit": "0123456789", "date": "today", "versions": {"torch": "2"}}
    lines = [json.dumps(row) for row in ({"provenance": facts}, one, ours, *peers, check, {"done": True})]
    kept = context_parallel_report.kept_of(lines)
    assert kept["machine"] == "4 of one host, each chip, 132 SMs" and len(kept["rows"]) == 6
    said = context_parallel_report.generated(kept)
    assert "| causal | 800.0 | **250.0** | 0.80 | – | no time left | failed | 300.0 (1.20×) |" in said
    assert "| causal | 2 | 1.50 | 5 | 1.25 | 1.12 |" in said
    assert "0 of 1 calls agree" in said and "0 of 1 gave the same bits" in said
