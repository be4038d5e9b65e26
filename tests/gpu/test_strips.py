"""2-D neighbourhoods on a GPU, in strips of an image's columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.rewrites import strips
from composattn.mods import neighborhood
from composattn.testing.tolerance import Case, check
from tests.support import gpu_backend, outlier_normal

IMAGES: dict[str, tuple[int, int, Any]] = {
    "square": (40, 48, neighborhood((40, 48), 7)),
    "wide": (11, 128, neighborhood((11, 128), (5, 17))),
    "tall": (70, 16, neighborhood((70, 16), (13, 5), dilation=(2, 1))),
    "causal": (33, 64, neighborhood((33, 64), (9, 6), is_causal=(True, True))),
}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_results_and_gradients_are_those_of_the_whole_image(
    d: int, batch: int, image: str, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(strips, "FEWER", dict.fromkeys(strips.FEWER, float("inf")))
    rows, columns, mask = IMAGES[image]
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, dout = (draw(batch, rows * columns, 4, d).transpose(1, 2) for _ in range(2))
    k, v = (draw(batch, 2, rows * columns, d) for _ in range(2))
    check(partial(ca.attention, backend=gpu_backend()), Case(q, k, v, mask_mod=mask, dout=dout, name=image))
