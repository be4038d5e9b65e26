"""What peers get silently wrong, in the kernels for Hopper, emulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from tests.silent_errors import MASKS, SCORES, Suite
from tests.support import sampled


class TestHopperEmulated(Suite):
    backend, heads, dim, dtype = "hopper-emulated", (2, 1), 64, torch.bfloat16

    # a forward and a backward each to compile; the streaming backend and GPUs have all of them
    @pytest.mark.parametrize("mask", sampled(MASKS))
    def test_masks(self, mask: str, generator: torch.Generator) -> None:
        super().test_masks(mask, generator)

    @pytest.mark.parametrize("score", sampled(SCORES))
    def test_scores_where_heads_share_keys(self, score: str, generator: torch.Generator) -> None:
        super().test_scores_where_heads_share_keys(score, generator)

    # what the score says is tested of whole sequences above
    @pytest.mark.parametrize("score", sampled(SCORES, every=3))
    def test_scores_on_ragged_lengths(self, score: str, generator: torch.Generator) -> None:
        super().test_scores_on_ragged_lengths(score, generator)
