"""Head dimensions above 256 on Hopper, emulated with no GPU: every layout, mod and way to divide the work."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import errors
from composattn.backends.fused.running.emulated import emulating
from composattn.call.schedule import Schedule
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import alibi, causal, neighborhood, relative_bias, sliding_window, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case
from tests.support import on_few_sms, sampled

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 512, "dtype": torch.bfloat16}


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q != 5)


def dense(**options: Any) -> Case:
    return make_case(3, batch=1, **{"gradients": False, **HEADS, "heads": 2, "kv_heads": 1, **options})


def varlen(**options: Any) -> Case:
    lengths, used = ((90, 0, 33), (80, 9, 200)), (80, 0, 33)
    return make_varlen_case(1, *lengths, used_q=used, **{"gradients": False, **HEADS, **options})


# a call, and how its work is divided
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "full": (dense(q_len=70, kv_len=200), {}),
    "causal with a softcap": (dense(q_len=150, kv_len=300, mask_mod=causal(), score_mod=softcap(20.0)), {}),
    "D 576, Dv 512, 128 heads of one": (dense(heads=128, q_len=1, kv_len=300, dim=576, v_dim=512), {}),
    "odd dims": (dense(q_len=33, kv_len=131, dim=328, v_dim=72, mask_mod=causal()), {}),
    "Dv alone is wide": (dense(q_len=65, kv_len=257, dim=40, v_dim=320, mask_mod=causal("bottom_right")), {}),
    "halves of Dv with nothing in the other": (dense(q_len=3, kv_len=40, dim=264, v_dim=8), {}),
    "fp16": (dense(q_len=70, kv_len=200, dtype=torch.float16, mask_mod=seen), {}),
    "rows that see nothing": (dense(q_len=70, kv_len=150, mask_mod=seen), {}),
    "a learned bias": (dense(q_len=70, kv_len=150, score_mod=relative_bias(torch.randn(2, 2 * 64 + 1))), {}),
    "listed tiles": (dense(q_len=256, kv_len=256, mask_mod=neighborhood((16, 16), (5, 3))), {}),
    "kv in parts": (dense(q_len=3, kv_len=600, mask_mod=causal("bottom_right")), {"schedule": Schedule(split_kv=3)}),
    "kv in parts, odd dims": (dense(q_len=3, kv_len=300, v_dim=264), {"schedule": Schedule(split_kv=2)}),
    "packed": (varlen(mask_mod=causal(), score_mod=alibi(4)), {}),
    "packed heads in packed rows": (varlen(), {"schedule": Schedule(pack_gqa=True)}),
    "paged": (make_paged_case(2, [300, 17, 0], page_size=16, **HEADS), {}),
    "pages of two tiles": (make_paged_case(2, [300, 129], page_size=256, q_lens=(9, 2), **HEADS), {}),
    "one order": (dense(q_len=70, kv_len=200, mask_mod=causal()), {"schedule": Schedule(batch_invariant=True)}),
}
EXTRA: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.tensor([3.0, -torch.inf, 0.5, -1.0])},
    "dropout": {"dropout": (0.4, 77 << 40 | 5)},
}


# seconds each, nearly all to compile: these by default, all of them with `make test-all`
QUICK = ("D 576, Dv 512, 128 heads of one", "kv in parts, odd dims", "paged")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_forward_is_as_close_as_plain_pytorch(name: str) -> None:
    case, options = CASES[name]
    attend = functools.partial(ca.attention, backend="hopper-emulated", **options)
    for mode in (EAGER, LATE, random_mode(7)):
        with emulating(mode):
            check(attend, case)


def _learned(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()


def _bias(values: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + values[h, q, kv]


GRADIENTS: dict[str, Callable[[Any, Any], Case]] = {
    "odd dims": lambda dense, _: dense(q_len=33, kv_len=131, dim=328, v_dim=72, mask_mod=causal()),
    "Dv alone is wide": lambda dense, _: dense(
        q_len=65, kv_len=150, dim=40, v_dim=320, mask_mod=causal("bottom_right")
    ),
    "fp16": lambda dense, _: dense(q_len=70, kv_len=200, dtype=torch.float16, mask_mod=seen),
    "learned distances": lambda dense, _: dense(q_len=70, kv_len=150, score_mod=relative_bias(_learned(2, 2 * 64 + 1))),
    "learned slopes": lambda dense, _: dense(q_len=70, kv_len=150, score_mod=alibi(_learned(2))),
    "a learned bias": lambda dense, _: dense(q_len=70, kv_len=80, score_mod=_bias(_learned(2, 70, 80))),
    "listed tiles": lambda dense, _: dense(q_len=256, kv_len=256, mask_mod=neighborhood((16, 16), (5, 3))),
    "packed": lambda _, varlen: varlen(mask_mod=causal(), score_mod=alibi(4)),
    "sinks": lambda dense, _: dataclasses.replace(
        dense(heads=4, kv_heads=2, q_len=70, kv_len=150, mask_mod=seen), **EXTRA["sinks"]
    ),
    "dropout": lambda dense, _: dataclasses.replace(dense(q_len=70, kv_len=150, mask_mod=seen), **EXTRA["dropout"]),
    "packed dropout": lambda _, varlen: dataclasses.replace(varlen(), **EXTRA["dropout"]),
}
IN_ORDER = ("packed dropout",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "odd dims" else pytest.mark.slow) for n in GRADIENTS]
)
def test_gradients_are_as_close_as_plain_pytorch(name: str) -> None:
    case = GRADIENTS[name](*(functools.partial(make, gradients=True) for make in (dense, varlen)))
    with emulating(random_mode(7)):
        check(functools.partial(ca.attention, backend="hopper-emulated", deterministic=name in IN_ORDER), case)


def test_values_may_lie_in_the_keys() -> None:
    case = dense(heads=16, q_len=2, kv_len=150, dim=576, v_dim=512, mask_mod=causal("bottom_right"))
    check(functools.partial(ca.attention, backend="hopper-emulated"), dataclasses.replace(case, v=case.k[..., :512]))


@pytest.mark.parametrize(
    "layout, extra", sampled([("dense", "sinks"), ("packed", "sinks"), ("packed", "dropout"), ("paged", "dropout")], 4)
)
def test_sinks_and_dropout(layout: str, extra: str) -> None:
    cases = {"dense": dense(heads=4, kv_heads=2, q_len=70, kv_len=150, mask_mod=seen), "packed": CASES["packed"][0],
             "paged": CASES["paged"][0]}  # fmt: skip
    case = dataclasses.replace(cases[layout], **EXTRA[extra])
    with emulating(random_mode(3)):
        check(functools.partial(ca.attention, backend="hopper-emulated"), case)


def test_the_largest_scores_are_those_of_the_reference() -> None:
    case = dense(q_len=70, kv_len=200)
    given: dict[str, Any] = {
        "mask_mod": seen, "score_mod": alibi(torch.tensor([0.5, 0.25])), "return_max_scores": True, "return_lse": True
    }  # fmt: skip
    found = ca.attention(case.q, case.k, case.v, backend="hopper-emulated", **given)
    wanted = ca.attention(case.q, case.k, case.v, backend="reference", **given)
    for x, y in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [random_mode(5), LATE], ids=str)
def test_a_block_that_stays_for_many_tiles(mode: Any) -> None:
    """Some of them have no keys."""
    late = dense(q_len=200, kv_len=140, mask_mod=lambda b, h, q, kv: (q - kv > 20) & (q < 150))
    attend = functools.partial(ca.attention, backend="hopper-emulated", schedule=Schedule(persistent=True))
    with on_few_sms("hopper-emulated", 2), emulating(mode):
        check(attend, late)


def test_what_lies_in_a_page_beyond_the_last_key_is_not_read() -> None:
    case = make_paged_case(5, [37], page_size=64, **{**HEADS, "heads": 2, "kv_heads": 1})
    assert case.paged is not None
    page = case.paged.page_table[0, 0]
    case.k[page, :, 37:], case.v[page, :, 37:] = torch.nan, torch.nan
    out = ca.attention(case.q, case.k, case.v, paged=case.paged, backend="hopper-emulated")
    assert not bool(out.isnan().any())


def test_gradients_are_refused_by_name_before_anything_is_computed() -> None:
    q = torch.zeros(1, 1, 8, 576, dtype=torch.bfloat16, requires_grad=True)
    what = 'has gradients for D and Dv up to 512, got 576 and 512; use backend="streaming" for gradients'
    with pytest.raises(errors.GradientUnsupported, match=what):
        ca.attention(q, q, q[..., :512], backend="hopper-emulated")


@pytest.mark.parametrize(
    "backend, dims, words",
    [
        ("hopper-emulated", (584, 512), "D in multiples of 8 up to 576, got 584"),
        ("hopper-emulated", (576, 520), "Dv in multiples of 8 up to 512, got 520"),
        ("blackwell-emulated", (512, 512), "D in multiples of 8 up to 256, got 512"),
        ("blackwell-emulated", (64, 512), "Dv in multiples of 8 up to 256, got 512"),
    ],
)
def test_what_is_too_wide_is_refused_by_name(backend: str, dims: tuple[int, int], words: str) -> None:
    q, v = (torch.zeros(1, 1, 8, d, dtype=torch.bfloat16) for d in dims)
    with pytest.raises(errors.UnsupportedHeadDim, match=words):
        ca.attention(q, q, v, backend=backend)


@pytest.mark.slow
def test_a_window_that_hides_all_of_a_warpgroups_keys_from_some_rows() -> None:
    case = dense(q_len=260, kv_len=260, mask_mod=causal() & sliding_window(30))
    check(functools.partial(ca.attention, backend="hopper-emulated"), case)
