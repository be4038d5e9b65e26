"""What peers get silently wrong, in the kernels for Hopper, emulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from tests.silent_errors import SCORES, Suite
from tests.support import sampled


class TestHopperEmulated(Suite):
    backend, heads, dim, dtype = "hopper-emulated", (2, 1), 64, torch.bfloat16

    # a forward and a backward each to compile; what the score says is tested of whole sequences above
    @pytest.mark.parametrize("score", sampled(SCORES, every=3))
    def test_scores_on_ragged_lengths(self, score: str, generator: torch.Generator) -> None:
        super().test_scores_on_ragged_lengths(score, generator)
