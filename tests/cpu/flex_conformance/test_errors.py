"""What torch refuses we refuse by an error of torch's type, with a name of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import composattn as ca
from tests.cpu.flex_conformance.catalogue import causal

Q, K, V = (torch.randn(2, 4, 64, 16) for _ in range(3))
BLOCKS = create_block_mask(causal, 2, 4, 64, 64, "cpu", 16)


def nested() -> list[torch.Tensor]:
    return [torch.nested.nested_tensor([t[0], t[1]], layout=torch.jagged) for t in (Q, K, V)]


# each takes either flex_attention
REFUSED: dict[str, Callable[[Any], Any]] = {
    "fewer key heads without enable_gqa": lambda flex: flex(Q, K[:, :2], V[:, :2]),
    "heads that can't be shared": lambda flex: flex(Q, K[:, :3], V[:, :3], enable_gqa=True),
    "head dimensions that differ": lambda flex: flex(Q, K[..., :8], V),
    "tensors on two devices": lambda flex: flex(Q, K.to("meta"), V),
    "a mask for longer sequences": lambda flex: flex(Q[:, :, :32], K[:, :, :32], V[:, :, :32], block_mask=BLOCKS),
    "a mask for shorter sequences": lambda flex: flex(*(torch.cat([t, t], 2) for t in (Q, K, V)), block_mask=BLOCKS),
    "a mask on another device": lambda flex: flex(Q, K, V, block_mask=BLOCKS.to("meta")),
    "a part of a mask": lambda flex: flex(Q[:, :, :16], K, V, block_mask=BLOCKS[:, :, 0]),
    "return_lse with return_aux": lambda flex: flex(Q, K, V, return_lse=True, return_aux=AuxRequest(lse=True)),
    "a BACKEND that torch does not have": lambda flex: flex(Q, K, V, kernel_options={"BACKEND": "INVALID"}),
    "nested tensors": lambda flex: flex(*nested()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_both(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        with pytest.raises(Exception) as theirs:
            REFUSED[name](torchs.flex_attention)
        with pytest.raises(ca.ComposattnError) as ours:
            REFUSED[name](ca.flex_attention)
    assert isinstance(ours.value, theirs.type), theirs.value


def test_options_that_torch_has_not_warn() -> None:
    with pytest.warns(UserWarning, match="which torch has not"):
        found = ca.flex_attention(Q, K, V, kernel_options={"BLOCKS": 16, "BACKEND": "TRITON"})
    assert torch.equal(found, ca.flex_attention(Q, K, V))


@pytest.mark.parametrize("options", [3, "BLOCK_M", [("BLOCK_M", 16)]])
def test_options_are_a_dict(options: Any) -> None:
    with pytest.raises(ca.errors.UnsupportedOption, match="a dict"):
        ca.flex_attention(Q, K, V, kernel_options=options)


def test_what_to_return_is_said_by_torchs_request() -> None:
    with pytest.raises(ca.errors.UnsupportedOption, match="AuxRequest"):
        ca.flex_attention(Q, K, V, return_aux=True)
