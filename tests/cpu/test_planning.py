"""What planning a mask costs on any machine: torch operations, and the largest of their tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.mods import causal, document, neighborhood, sliding_window
from composattn.mods.mask import Mask

CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """Counts operations, and the elements of the largest tensor that one gives; views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.largest = max(self.largest, *(t.numel() for t in (out, *args) if isinstance(t, torch.Tensor)), 0)
        return out


def planned(mask: Mask, length: int) -> Counted:
    problem = Problem(1, 16, 16, length, length, 128, 128, torch.bfloat16, CPU)
    with Counted() as counted:
        plan = plan_forward(problem, Program(None, mask.expr), HOPPER)
        if plan.lists is not None:
            plan.lists.of_call()
    return counted


def ids(length: int) -> torch.Tensor:
    return torch.arange(length) // 700


# what each takes now and a tenth, so that more is a decision; tiles of a neighbourhood are counted for strips of two
# widths
COSTS: dict[str, tuple[Callable[[], Mask], int, int]] = {
    "window": (lambda: causal() & sliding_window(1024), 1 << 20, 78),
    "neighbourhood": (lambda: neighborhood((128, 128), (7, 7)), 1 << 14, 389),
    "documents": (lambda: document(ids(8192)) & causal(), 8192, 231),
    "documents-numbered-backwards": (lambda: document(ids(8192).flip(0)) & causal(), 8192, 224),
    "documents-with-gaps": (lambda: document(ids(8192).roll(5)) & causal(), 8192, 340),
}


@pytest.mark.parametrize("name", COSTS)
def test_planning_takes_few_operations(name: str) -> None:
    mask, length, operations = COSTS[name]
    assert planned(mask(), length).operations <= operations


def test_operations_do_not_grow_with_the_length() -> None:
    for mask in (causal() & sliding_window(100), neighborhood((64, 64), (5, 5)), neighborhood((64, 128), (5, 5))):
        few, many = planned(mask, 4096), planned(mask, 8192)
        assert many.operations <= few.operations


def test_nothing_as_large_as_the_mask_is_made() -> None:
    length = 1 << 14
    assert planned(causal() & sliding_window(1024), length).largest <= length
    assert planned(neighborhood((128, 128), (7, 7)), length).largest <= 4 * (length // 128) ** 2
