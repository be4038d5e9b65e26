"""Whether a tensor has the form of another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from composattn.graph.tensor_forms import of_the_form, of_these_forms

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


@pytest.mark.parametrize("given", [(0, 1, 2), (0, 1, 1), (0, 0, 1), (0, 1, 0), (0, 0, 0)])
def test_three_tensors_have_their_forms_each_and_may_be_the_same_one(given: tuple[int, ...]) -> None:
    made = [torch.zeros(2, 3, 8) for _ in range(3)]
    have_them = of_these_forms(*[made[n] for n in given])
    assert have_them(*[made[n] for n in given])
    assert have_them(*[torch.ones(2, 3, 8) for _ in range(3)])
    for place in range(3):
        others = [torch.zeros(2, 3, 9 if n == place else 8) for n in range(3)]
        assert not have_them(*others)


def test_tensors_that_are_one_may_be_met_after_three_by_another_look() -> None:
    x, three = torch.zeros(2, 3, 8), [torch.zeros(2, 3, 8) for _ in range(3)]
    assert not of_these_forms(*three)(x, x, x)
    assert of_these_forms(x, x, x)(*three)
