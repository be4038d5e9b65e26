"""Checks of attention that anyone can use: the tolerance rule, random calls, memory that shows what was not written.

    from functools import partial
    from composattn.testing import check, random_case

    for seed in range(100):
        check(partial(composattn.attention, backend="streaming"), random_case(seed))

    # a mod of your own, on inputs of your own
    check(composattn.attention, Case(q, k, v, score_mod=mine, mask_mod=causal(), dout=torch.randn_like(q)))

`composattn.testing.strategies` draws the same cases, masks and score mods for hypothesis, which shrinks what fails.
"""

from .cases import FUSED, SMALL, Space, random_case
from .memory import poisoned
from .tolerance import Case, assert_attention_close, check, run

__all__ = ["FUSED", "SMALL", "Case", "Space", "assert_attention_close", "check", "poisoned", "random_case", "run"]
