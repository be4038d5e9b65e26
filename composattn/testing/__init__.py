"""Checks of attention that anyone can use: the tolerance rule, random calls, memory that shows what was not written.

    from dataclasses import replace
    from functools import partial
    from composattn.testing import SMALL, check, random_case

    for seed in range(100):
        check(partial(composattn.attention, backend="streaming"), random_case(seed))

    # packed sequences, and keys in pages
    check(composattn.attention, random_case(0, replace(SMALL, layouts=("varlen", "paged"))))

    # a mod of your own; Case(q, k, v, ...) takes tensors of your own as well
    check(composattn.attention, make_case(0, score_mod=mine, mask_mod=causal(), heads=8, kv_heads=2, q_len=257))

`composattn.testing.strategies` draws the same cases, masks and score mods for hypothesis, which shrinks what fails.
"""

from .cases import make_case, random_case
from .memory import poisoned
from .packed import make_paged_case, make_varlen_case
from .site import FUSED, SMALL, Space
from .tolerance import Case, assert_attention_close, check, run

__all__ = [
    "FUSED",
    "SMALL",
    "Case",
    "Space",
    "assert_attention_close",
    "check",
    "make_case",
    "make_paged_case",
    "make_varlen_case",
    "poisoned",
    "random_case",
    "run",
]
