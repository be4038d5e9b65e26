"""What calls tell of themselves: names in profiles, and the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import composattn as ca
from benchmarks.host_work import without_kernels
from composattn import watched
from composattn.analysis.program import Program
from composattn.graph.titles import LONGEST
from composattn.mods import alibi, causal, sliding_window, softcap

SLOPES = torch.tensor([0.5, 0.25])


def inputs(dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 64, 64, dtype=dtype, requires_grad=grad) for _ in range(3)]


def ranges(call: Any) -> list[str]:
    """Names of our ranges in a profile of a call and its backward, in the order in which they began."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = call()
        if out.requires_grad:
            out.sum().backward()
    ours = [e for e in profile.events() if e.name.startswith("composattn ")]
    return [e.name for e in sorted(ours, key=lambda e: e.time_range.start)]


def test_a_profile_tells_mask_score_backend_and_direction() -> None:
    window = causal() & sliding_window(8)
    found = ranges(lambda: ca.attention(*inputs(), mask_mod=window, score_mod=alibi(SLOPES) >> softcap(30.0)))
    named = "causal & sliding_window(8), alibi >> softcap(30.0), streaming"
    assert found == [f"composattn forward: {named}", f"composattn backward: {named}"]


def test_kernels_and_their_fast_path_are_named_alike() -> None:
    q, k, v = inputs(torch.bfloat16)
    with without_kernels():
        found = [ranges(lambda: ca.attention(q, k, v, mask_mod=causal())) for _ in range(4)]
    assert found == [["composattn forward: causal, hopper", "composattn backward: causal, hopper"]] * 4


def test_a_planned_call_is_named_by_its_mods() -> None:
    attn = ca.Attention(score_mod=softcap(20.0))
    assert ranges(lambda: attn(*inputs(grad=False))) == ["composattn forward: softcap(20.0), streaming"]
    assert ranges(lambda: ca.attention(*inputs(grad=False))) == ["composattn forward: no mods, streaming"]


def test_a_function_is_called_by_its_name_and_a_lambda_by_its_formula() -> None:
    def every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv) % 3 == 0

    named = ca.Attention(mask_mod=every_third).program.title
    without = ca.Attention(mask_mod=causal() & (lambda b, h, q, kv: kv < 40)).program.title
    assert (named, without) == ("every_third", "q >= kv & kv < 40")


def test_a_long_formula_is_cut() -> None:
    mask = ca.mask(lambda b, h, q, kv: (kv < 3) | (q - kv == 5) | (q - kv == 7) | (q - kv == 11) | (q - kv == 13))
    title = ca.Attention(mask_mod=mask & mask).program.title
    assert len(title) == LONGEST and title.endswith("…")


def test_sinks_and_dropout_are_named() -> None:
    attn = ca.Attention(mask_mod=causal(), sinks=torch.zeros(2), dropout_p=0.5)
    assert attn.program.title == "causal, sinks, dropout"
    assert Program().title == "no mods"


def test_nothing_is_named_where_nobody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)
    with without_kernels():
        q, k, v = inputs(torch.bfloat16)
        for _ in range(3):
            ca.attention(q, k, v, mask_mod=causal()).sum().backward()
    ca.attention(*inputs(), mask_mod=causal()).sum().backward()


def test_a_warning_of_one_kind_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_said", set())
    for words in ("a", "b"):
        watched.say_once("kind", words)
    assert caplog.messages == ["a"]


def test_what_is_compiled_is_told_before_and_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "composattn")
    with watched.timed("forward, D 128, causal", "/a/folder"):
        assert caplog.messages == ["compiling forward, D 128, causal"]
    assert caplog.messages[1].startswith("compiled forward, D 128, causal: 0.0 s, kept in /a/folder")


@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_line_of_the_log_is_written_once(
    is_set_up: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = logging.Logger("the root of a program")
    if is_set_up:
        programs.addHandler(logging.StreamHandler())
    monkeypatch.setattr(watched.LOG, "parent", programs)
    with watched.on_screen():
        watched.LOG.warning("compiling")
    assert capsys.readouterr().err == "compiling\n"
