"""Cases of context parallel's benchmark: masks and lengths, tensors, this package on one GPU and on several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import composattn as ca
from composattn.mods import causal, document, sliding_window

T = torch.Tensor
WINDOW, DOCUMENTS = 4096, 40
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """A mask and a length."""

    mask: str
    seq_len: int = 131072
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Lengths of the documents, log-normal; a fixed draw."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(DOCUMENTS, generator=generator).mul(0.8).exp()
        ends = (weights.cumsum(0) / weights.sum() * self.seq_len).round().long()
        ends[-1] = self.seq_len
        return torch.cat([ends[:1], ends.diff()]).tolist()  # type: ignore[no-any-return]

    def ids(self, device: torch.device) -> T:
        return torch.repeat_interleave(torch.arange(DOCUMENTS), torch.tensor(self.lengths)).int().to(device)

    def mask_of(self, device: torch.device) -> ca.Mask:
        if self.mask == "causal":
            return causal()
        if self.mask == "window":
            return causal() & sliding_window(WINDOW)
        return causal() & document(self.ids(device))

    @property
    def pairs(self) -> float:
        """That are visible, of one head."""
        n = self.seq_len
        if self.mask == "causal":
            return n * (n + 1) / 2
        if self.mask == "window":
            return n * WINDOW - WINDOW * (WINDOW - 1) / 2
        return sum(m * (m + 1) / 2 for m in self.lengths)

    @property
    def flops(self) -> float:
        """FLOPs of a forward and a backward."""
        return 3.5 * 4 * self.pairs * self.heads * HEAD_DIM

    def tensors(self, device: torch.device) -> tuple[T, T, T, T]:
        """q, k, v and the gradient of out, (1, H, S, D) in bf16 as views of (1, S, H, D); the same on every rank."""
        generator = torch.Generator(device).manual_seed(1)
        made = (
            torch.randn(1, self.seq_len, h, HEAD_DIM, generator=generator, device=device, dtype=torch.bfloat16)
            for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        return tuple(t.transpose(1, 2) for t in made)  # type: ignore[return-value]


@dataclass
class Contestant:
    """Who is measured: a forward, what it is differentiated in, and the gradient that comes in.

    shard: how ranks share the work, of this package's context parallel.
    """

    forward: Callable[[], T]
    leaves: tuple[T, T, T]
    grad: T
    shard: Any = None

    def step(self) -> tuple[T, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.grad)


def here() -> torch.device:
    """This process's GPU; a CPU, where there is none, to try what can be tried."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def settle(forget: bool = False) -> None:
    """Waits for the GPU, where there is one; `forget`: and gives back memory that nobody uses."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if forget:
            torch.cuda.empty_cache()


def in_rows(t: T) -> T:
    """A copy of (1, H, S, D) as a view of (1, S, H, D)."""
    return t.detach().transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def contestant(forward: Callable[[T, T, T], T], tensors: Any, shard: Any = None) -> Contestant:
    """`forward` of copies of q, k and v."""
    q, k, v, grad = map(in_rows, tensors)
    qkv = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    return Contestant(lambda: forward(*qkv), qkv, grad, shard)


def one_gpu(case: Case) -> Contestant:
    """This package, all of the sequence on one GPU."""
    attn = ca.Attention(mask_mod=case.mask_of(here()))
    return contestant(attn, case.tensors(here()))


def several_gpus(case: Case, cp: ca.ContextParallel | None = None, **options: Any) -> Contestant:
    """This package's context parallel, of all ranks, or as `cp` has them."""
    attn = ca.Attention(mask_mod=case.mask_of(here()))
    shard = (cp or ca.ContextParallel(dist.group.WORLD, **options)).plan(attn, case.seq_len)
    mine = [shard.scatter(t, 2) for t in case.tensors(here())]
    return contestant(lambda q, k, v: attn(q, k, v, context_parallel=shard), mine, shard)


class Nobody:
    """Ranks that are not there: what would come is drawn numbers. To compile, and to time one rank's computing alone.

    Numbers, as a GPU multiplies zeros with less power and so at a higher clock.
    """

    backend, device_type, timeout, moved_bytes = "none", "any", None, 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def check_device(self, device: torch.device) -> None:
        pass

    def exchange(self, sends: Any, into: Any) -> Any:
        for each in into:
            for t in each:
                _drawn(t)
        return _THERE

    def gather(self, rows: T) -> Any:
        return _drawn(rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))), _THERE

    def total(self, numbers: T, kind: Any = None) -> T:
        return numbers

    def said_by_all(self, numbers: T) -> T:
        return numbers.cpu().expand(self.size, -1)


class _There:
    def arrived(self) -> None:
        pass


_THERE = _There()
_numbers: dict[tuple[torch.dtype, torch.device], T] = {}


def _drawn(t: T) -> T:
    """Fills `t` by one copy, of numbers drawn once."""
    known = _numbers.get((t.dtype, t.device))
    if known is None or known.numel() < t.numel():
        known = _numbers[t.dtype, t.device] = torch.randn(t.numel(), dtype=t.dtype, device=t.device)
    return t.copy_(known[: t.numel()].view(t.shape))


def apart(rank: int, size: int, **options: Any) -> ca.ContextParallel:
    """A context parallel of one process that stands for one of `size` ranks."""
    cp = ca.ContextParallel.__new__(ca.ContextParallel)
    cp.ranks = Nobody(rank, size)  # type: ignore[assignment]
    cp.method, cp.parts = options.get("method", "auto"), options.get("parts")
    cp.keep_fetched = options.get("keep_fetched", True)
    cp.captured_gradients, cp._shard = "whole", None
    return cp
