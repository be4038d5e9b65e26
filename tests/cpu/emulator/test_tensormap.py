"""Boxes of tensors that bulk copies store, or add to what is there."""

from __future__ import annotations

import pytest
import torch

from composattn.emulator import findings
from composattn.emulator.memory import GlobalMemory
from composattn.emulator.tensormap import TensorMap

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def numbers(kind: str, seed: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(KINDS[kind])


def store(there: torch.Tensor, kind: str, corner: tuple[int, int], box: torch.Tensor, reduce: str = "") -> None:
    """A box of all 4 x 16 numbers, to (column, row)."""
    size, memory = there.element_size(), GlobalMemory()
    memory.add(there.data_ptr(), there.view(torch.uint8).numpy().reshape(-1), "there")
    tensor = TensorMap(there.data_ptr(), kind, size, (16, 4), (size, 16 * size), (16, 4))
    tensor.store(memory, corner, box.view(torch.uint8).numpy().reshape(-1), reduce)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_adds_numbers_of_its_type_and_rounds_each_sum(kind: str) -> None:
    there, box = numbers(kind, 1), numbers(kind, 2)
    wanted = torch.cat([there[:1], there[1:] + box[:3]])
    store(there, kind, (0, 1), box, "add")
    assert torch.equal(there, wanted)


def test_a_box_that_begins_in_front_of_its_tensor_is_not_stored() -> None:
    there = numbers("f32", 1)
    with pytest.raises(findings.OutOfBounds, match=r"stored at \(0, -1\)"):
        store(there, "f32", (0, -1), numbers("f32", 2))
