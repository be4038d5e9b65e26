"""Classes of transformers under attn_implementation="composattn": as in eager, or refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

import transformers

import composattn.integrations.transformers as integration
from tests.cpu.integrations.every_class import KINDS, Verdict, classes, judged

BY_DAY = [  # each stands for a kind, and what it has to be
    ("causal", "doge", Verdict.RIGHT),  # its layers read the mask as a tensor, and its class
    ("causal", "minimax_m3_vl_text", Verdict.RIGHT),  # full attention, by groups
    ("causal", "gemma4_text", Verdict.RIGHT),  # cuts the mask's queries
    ("causal", "deepseek_v4", Verdict.RIGHT),  # widens the mask by keys of its own
    ("encoder and decoder", "t5gemma2", Verdict.RIGHT),  # joins two masks
    ("causal", "deepseek_v32", Verdict.REFUSED),  # picks single keys for each query
    ("causal", "mpt", Verdict.REFUSED),  # never asks
    ("causal", "git", Verdict.REFUSED),  # looks its layers up in a table of its own
]


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()


@pytest.mark.parametrize(("kind", "name", "wanted"), BY_DAY)
def test_a_class_of_each_kind_is_right_or_refused(kind: str, name: str, wanted: Verdict) -> None:
    found = judged(kind, name)
    assert found.verdict is wanted, found


ALL_ARE_MADE = "5.24."  # the version of transformers of which each class has a small configuration
EVERY = [pytest.param(kind, name, id=f"{kind}-{name}") for kind in KINDS for name in classes(kind)]


@pytest.mark.nightly
@pytest.mark.parametrize("sharp", [False, True], ids=["drawn", "sharp"])
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_class_is_right_or_refused_by_name(kind: str, name: str, sharp: bool) -> None:
    found = judged(kind, name, sharp)
    if found.verdict is Verdict.NOT_MADE and not transformers.__version__.startswith(ALL_ARE_MADE):
        pytest.skip(found.why)
    assert found.verdict in (Verdict.RIGHT, Verdict.REFUSED), found
