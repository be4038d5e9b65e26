"""2-D neighbourhoods on a GPU, in strips of an image's columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.backends.fused.rewrites import image_costs
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
    slow = {of: cost._replace(pairs=1e6) for of, cost in image_costs.COSTS.items()}
    monkeypatch.setattr(image_costs, "COSTS", slow)
    rows, columns, mask = IMAGES[image]
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, dout = (draw(batch, rows * columns, 4, d).transpose(1, 2) for _ in range(2))
    k, v = (draw(batch, 2, rows * columns, d) for _ in range(2))
    check(partial(ca.attention, backend=gpu_backend()), Case(q, k, v, mask_mod=mask, dout=dout, name=image))


def test_an_image_whose_last_row_is_cut_is_right_call_after_call_and_in_a_graph(generator: torch.Generator) -> None:
    mask = neighborhood((86, 96), 13)
    draw = partial(outlier_normal, generator=generator, dtype=torch.bfloat16, device="cuda")
    q, k, v, dout = (draw(1, 4, 8192, 128) for _ in range(4))
    call = partial(ca.attention, backend=gpu_backend())
    check(call, Case(q, k, v, mask_mod=mask, dout=dout))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def results() -> list[torch.Tensor]:
        out = call(*leaves, mask_mod=mask)
        # a result that keeps its graph keeps the leaves' streams, which a capture may not wait for
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    with torch.no_grad():
        wanted = call(q, k, v, mask_mod=mask)
    for _ in range(20):  # memory of one call is that of the next
        found = results()
        assert torch.equal(found[0], wanted)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        recorded = results()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded[0], wanted)
    for one, other in zip(recorded[1:], found[1:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
