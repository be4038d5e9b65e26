"""Dropout of attention weights: which pairs are kept, by a seed; see `graph.philox` for the bits."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_batchedtensor

from .. import errors
from ..graph.expr import refuse_lazy
from ..graph.philox import ONE
from ..graph.scalar import LocalScalar, Scalar
from .mod import Mod

_SEEDS = 1 << 62  # from 0 on; a run-time number that begins with so many has 64 bits


class _DrawnSeed(LocalScalar):
    """A seed that torch's generator gives for each call."""

    __slots__ = ()

    in_graphs = (
        "the seed of dropout, which torch's generator draws without dropout_seed= (a 0-d int64 tensor on q's device),"
    )

    def __reduce__(self) -> Any:
        return "SEED"


class _Given(Scalar):
    """A seed that a user gave for good."""

    __slots__ = ()

    in_graphs = None


def seed_number() -> Scalar:
    """A run-time number for seeds that users give, with a value per thread."""
    return LocalScalar(_SEEDS)


SEED = _DrawnSeed(_SEEDS)
"""That of the call which this thread makes now: a run-time number of each call's own would be a plan of its own."""


class Dropout(Mod):
    """The pairs that dropout keeps: (seed, b, h, q, kv) → bool. The seed is a run-time number or a 0-d tensor."""

    __slots__ = ()
    _kind = "dropout"

    @staticmethod
    def with_seed(p: float, seed: int | torch.Tensor | None, number: Scalar | None = None) -> Dropout | None:
        """Weights are dropped with probability `p`, in steps of 2^-16; None where that is 0.

        seed: an int or a 0-d int64 tensor; None, which torch's generator gives: see `draw`. `number` holds an int.

        Raises: `UnsupportedOption`, `UnsupportedLayout` of a lazy seed.
        """
        if isinstance(p, float) and p == 0.0:
            return None
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p <= 1.0 - 1.0 / ONE:
            raise errors.UnsupportedOption(
                f"dropout_p is {p!r:.40}; it must be a number from 0 to less than 1, at most {ONE - 1}/{ONE}"
            )
        p = float(p)  # in a compiled region, one that varies is what it is now
        least = round(p * ONE)
        if least == 0:
            return None
        if isinstance(seed, torch.Tensor):
            refuse_lazy("dropout_seed", seed)
            if seed.ndim != 0 or seed.dtype is not torch.int64:
                raise errors.UnsupportedOption(
                    f"dropout_seed is {seed.dtype} of shape {tuple(seed.shape)}; pass an int, or a 0-d int64 tensor"
                )
            return Dropout.formed(_form("read", least), (seed,), f"dropout({p})")
        if seed is None:
            number = SEED
        else:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
                raise errors.UnsupportedOption(
                    f"dropout_seed is {seed!r}; pass an int of [0, 2^63), or a 0-d int64 tensor"
                )
            number = _Given(_SEEDS) if number is None else number
            number.value = seed
        return Dropout.formed(_form("scalar", least), (number,), f"dropout({p})")

    def draw(self) -> None:
        """Another seed of torch's generator for this thread's next call, where it gives that.

        Raises: `UnsupportedTransform` below a vmap that draws one for each sample.
        """
        if self.leaves[0] is SEED:
            drawn = torch.randint(_SEEDS, (), device="cpu")
            if is_batchedtensor(drawn):
                raise errors.UnsupportedTransform(
                    "below vmap(randomness='different') each sample has a seed of its own, which is no Python number; "
                    "map over a tensor of seeds, and pass each as dropout_seed=seed to ca.attention"
                )
            SEED.value = int(drawn)

    def on_device(self, device: torch.device) -> Dropout:
        """With a tensor for a seed, as compiled code and CUDA graphs want it; drawn there where torch gives it."""
        seed = self.leaves[0]
        if isinstance(seed, torch.Tensor):
            return self
        if seed is SEED:
            there = torch.randint(_SEEDS, (), device=device, dtype=torch.int64)
        else:
            there = torch.full((), seed.value, device=device, dtype=torch.int64)
        return Dropout.formed(self.form.replace("op:scalar", "op:read"), (there,), self.name)


def _form(seed: str, least: int) -> str:
    return (
        f"('steps', 1, (('op:{seed}', 't0'), ('op:const', {least}, 'int32'), "
        "('op:kept', None, 'x0', 'b', 'h', 'q', 'kv', 'x1')), 'x2')"
    )
