"""What random calls are drawn from: a source of choices, the space of shapes, and the shapes of one call."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import GroupMismatch


@dataclass(frozen=True)
class Space:
    """What cases are drawn from.

    Lengths: 1, primes, powers of two and their neighbours, from `shortest` to `longest`. `gradients`: whether cases
    have gradients of out and lse; `learned`: whether captured float tensors may require grad. `layouts`: how sequences
    lie, each as likely as it is often named; "paged" cases have no gradients. `eight_bits`: whether k and v, or q too,
    may have 8 bits and scales of any shape; such cases have no gradients.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    head_dims: tuple[int, ...] = (1, 3, 8, 16)
    shortest: int = 1
    longest: int = 40
    kv_heads: tuple[int, ...] = (1, 2, 3)
    groups: tuple[int, ...] = (1, 2, 3)
    batches: tuple[int, ...] = (1, 2, 3)
    gradients: bool = True
    learned: bool = True
    layouts: tuple[Literal["dense", "varlen", "paged"], ...] = ("dense",)
    eight_bits: bool = False
    device: str | torch.device = "cpu"


SMALL = Space()
"""Small calls of every kind, for a CPU."""

FUSED = Space(
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(8, 40, 64, 64, 72, 96, 128, 128, 128, 192, 256),
    longest=700,
    groups=(1, 1, 2, 3, 4, 8),
    device="cuda",
)
"""Calls for the fused kernels, of several tiles."""

_LENGTHS = (1, 2, 3, 7, 8, 13, 16, 17, 23, 31, 32, 33, 37, 61, 64, 65, 97, 127, 128, 129, 131, 192, 211, 256, 257, 311)
_LONG = (384, 509, 512, 641, 700, 1021, 1024, 1025, 2039, 2048, 4093, 4096)


@dataclass
class Site:
    """The shapes that mods are drawn for, and the sources of choices and numbers."""

    choices: random.Random
    space: Space
    generator: torch.Generator
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def normal(self, *shape: int, outliers: bool = False) -> torch.Tensor:
        """N(0, 1), with outliers N(0, 10²) at one element of a thousand; fp64, or less where the dtype is less."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if outliers:
            rare = torch.rand(shape, generator=self.generator) < 1e-3
            drawn = drawn + torch.where(rare, 10.0 * torch.randn(shape, generator=self.generator), 0.0)
        return drawn.to(torch.promote_types(self.dtype, torch.float32)).to(self.space.device)

    def activations(self, *shape: int) -> torch.Tensor:
        """What q, k and v hold: N(0, 1) with outliers, in the dtype of the call."""
        return self.normal(*shape, outliers=True).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers of [low, high], int32 or int64."""
        dtype = self.choices.choice((torch.int32, torch.int64))
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.space.device, dtype)

    def table(self, *shape: int, size: float = 1.0, positive: bool = False) -> torch.Tensor:
        """A captured float tensor; it may ask for its gradient, and may be as narrow as q."""
        drawn = size * self.normal(*shape)
        drawn = drawn.abs() + 0.5 if positive else drawn
        if self.choices.randint(0, 3) == 0:
            drawn = drawn.to(self.dtype)
        return drawn.requires_grad_(self.space.learned and self.choices.randint(0, 2) > 0)


def site_of(
    seed: int,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Site:
    """A site of these shapes; the rest comes from the seed. Raises `GroupMismatch`."""
    if heads % kv_heads:
        raise GroupMismatch(f"{heads} query heads can't share {kv_heads} key/value heads; heads must be a multiple")
    generator = torch.Generator().manual_seed(seed)
    return Site(
        random.Random(seed), Space(device=device), generator, batch, kv_heads, heads // kv_heads, q_len, kv_len, dtype
    )


def draw_site(choices: random.Random, space: Space = SMALL) -> Site:
    """Shapes, dtype and a source of numbers."""
    lengths = [n for n in (*_LENGTHS, *_LONG) if space.shortest <= n <= space.longest]
    q_len = choices.choice(lengths)
    kv_len = q_len if choices.randint(0, 1) else choices.choice(lengths)
    return Site(
        choices,
        space,
        torch.Generator().manual_seed(choices.randint(0, 2**31 - 1)),
        choices.choice(space.batches),
        choices.choice(space.kv_heads),
        choices.choice(space.groups),
        q_len,
        kv_len,
        choices.choice(space.dtypes),
    )
