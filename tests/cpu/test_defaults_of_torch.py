"""A call says itself of what type and where its tensors are: torch's defaults, which models set, change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import composattn as ca
from composattn.mods import (
    alibi,
    causal,
    dilated_window,
    document,
    neighborhood,
    shared_prefix,
    softcap,
    t5_bucket_bias,
)
from tests.support import qkv

Q, K, V = qkv(generator=torch.Generator().manual_seed(0), q_len=60, kv_len=60, dim=16)
NARROW = [t.to(torch.float8_e4m3fn) for t in (K, V)]
IDS, OFFSETS, TABLE = torch.arange(60) // 7, torch.tensor([0, 20, 41, 60]), torch.randn(8, Q.shape[1])
PAGED = ca.Paged(
    torch.arange(8, dtype=torch.int32).view(Q.shape[0], -1), 16, torch.zeros(Q.shape[0], dtype=torch.int32)
)


def kept_in_pages() -> torch.Tensor:
    pages = torch.zeros(8, K.shape[1], 16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    PAGED.append(ca.Quantized(pages, 0.7), ca.Quantized(pages.clone(), 0.7), K, V)
    return pages.float()


def gradient() -> torch.Tensor:
    q = Q.detach().requires_grad_()
    return torch.autograd.grad(ca.attention(q, K, V, mask_mod=causal()).sum(), q)[0]


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "alibi": lambda: ca.attention(Q, K, V, score_mod=alibi(Q.shape[1]) >> softcap(3.0)),
    "documents": lambda: ca.attention(Q, K, V, mask_mod=document(IDS.clone())),
    "a shared prefix": lambda: ca.attention(Q, K, V, mask_mod=shared_prefix(OFFSETS.clone())),
    "pixels": lambda: ca.attention(Q, K, V, mask_mod=neighborhood((6, 10), 3)),
    "buckets": lambda: ca.attention(Q, K, V, score_mod=t5_bucket_bias(TABLE)),
    "scales of 8 bits": lambda: ca.attention(Q, *NARROW, k_scale=0.7, v_scale=1.3),
    "rows of 8 bits": lambda: ca.quantize(Q, K, V, scale="token").k.data.float(),
    "pages of 8 bits": kept_in_pages,
    "weights": lambda: ca.attention_weights(Q, K, rows=[3, 50], mask_mod=causal()),
    "gradients": gradient,
    "dense": lambda: ca.attention(Q, K, V, mask_mod=causal(), backend="reference"),
}


@pytest.fixture(params=["a type of 16 bits", "another device"])
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    if request.param == "another device":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)
    torch.set_default_device(None)


WANTED = {name: call() for name, call in CALLS.items()}


@pytest.mark.parametrize("name", CALLS)
def test_defaults_of_torch_change_no_result(name: str, defaults: None) -> None:
    torch.testing.assert_close(CALLS[name](), WANTED[name], rtol=0, atol=0)


PLANNED = {
    "pixels": lambda: ca.Attention(mask_mod=neighborhood((16, 16), 5), backend="hopper"),
    "documents": lambda: ca.Attention(mask_mod=document(torch.arange(256, device="cpu") // 50), backend="hopper"),
    "remainders": lambda: ca.Attention(mask_mod=dilated_window(8, 2), backend="hopper"),
    "by blocks of queries": lambda: ca.Attention(mask_mod=causal(), score_mod=alibi(4), backend="warp"),
}


@pytest.mark.parametrize("name", PLANNED)
def test_calls_are_planned_on_the_host_whatever_device_is_the_default(name: str) -> None:
    q, k, v = qkv(generator=torch.Generator().manual_seed(0), q_len=256, dim=64, dtype=torch.bfloat16)
    with torch.device("meta"):
        found = str(PLANNED[name]().explain(q, k, v))
    assert found == str(PLANNED[name]().explain(q, k, v))


def test_weights_are_of_fp32_products_below_autocast_too() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = ca.attention_weights(Q, K, rows=[3, 50], mask_mod=causal())
    torch.testing.assert_close(found, WANTED["weights"], rtol=0, atol=0)
