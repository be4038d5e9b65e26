"""Whether a tensor has the form of another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from composattn.graph.forms import of_the_form

OF = torch.zeros(2, 3, 8)
OTHERS: dict[str, Callable[[], object]] = {
    "shape": lambda: torch.zeros(2, 3, 9),
    "rank": lambda: torch.zeros(6, 8),
    "strides": lambda: torch.zeros(3, 2, 8).transpose(0, 1),
    "dtype": lambda: torch.zeros(2, 3, 8, dtype=torch.bfloat16),
    "device": lambda: torch.zeros(2, 3, 8, device="meta"),
    "class": lambda: torch.nn.Parameter(torch.zeros(2, 3, 8), requires_grad=False),
    "gradient": lambda: torch.zeros(2, 3, 8, requires_grad=True),
    "no tensor": lambda: 3,
    "none": lambda: None,
}


def test_another_tensor_of_the_form_has_it() -> None:
    has_it = of_the_form(OF)
    assert has_it(torch.ones(2, 3, 8))
    with torch.no_grad():
        assert has_it(OF)


@pytest.mark.parametrize("name", OTHERS)
def test_a_tensor_of_another_form_has_not(name: str) -> None:
    assert not of_the_form(OF)(OTHERS[name]())  # type: ignore[arg-type]


def test_what_torch_dispatches_by_belongs_to_the_form() -> None:
    has_it, seen = of_the_form(OF), []
    with torch.inference_mode():
        assert not has_it(OF)
    torch.vmap(lambda x: (seen.append(has_it(OF)), x)[1])(torch.zeros(2))
    assert seen == [False]
