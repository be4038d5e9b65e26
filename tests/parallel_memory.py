"""What a rank holds at the most in a step, by the tensors that are alive; in place of kernels, their memory alone."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.context_parallel_cases import HEAD_DIM, Case, apart, several_gpus
from composattn.call.autograd import BackwardInputs
from composattn.call.strides import ordered

T = torch.Tensor


class Alive(TorchDispatchMode):
    """Counts bytes of tensors that were seen and still are; `most`: at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.most = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in (leaf for leaf in tree_leaves((args, found)) if isinstance(leaf, T)):
            storage = t.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.bytes)
        return found

    def _gone(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.bytes -= size


class Gradient:
    """The memory of a generated kernel's backward: what it gives, and sums of dQ in fp32 while it runs."""

    def backward(self, known: BackwardInputs) -> list[T | None]:
        sums = torch.empty(known.q.shape, dtype=torch.float32)
        grads = [ordered(t, t.shape[-1]) for t in (known.q, known.k, known.v)]
        del sums
        return [*grads, *[None] * len(known.captured)]


def _forward(offset_mods: Any, options: Any, offsets: Any, tensors: Any, given: Any, max_scores: bool) -> Any:
    q, _, v = tensors
    return (ordered(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32), None), Gradient()


def over_rows(mask: str, rank: int, ranks: int, length: int) -> float:
    """What a rank holds in a forward and a backward, over its rows, the rows that it fetches, and its sums of dQ.

    Of a row: q, k, v, out, LSE, and their gradients; of one that is fetched: k, v and their gradients.
    """
    case = Case(mask, length, heads=8, kv_heads=2)
    with (
        patch("composattn.parallel.moving_keys.part_call.forward", _forward),
        patch("benchmarks.context_parallel_cases._drawn", lambda t: t),
    ):
        each = several_gpus(case, apart(rank, ranks, parts=1))
        each.step()  # plans
        with Alive() as alive:
            each.step()
    own = each.leaves[0].shape[2]
    of_kv = case.kv_heads * HEAD_DIM * 4
    fetched = each.shard._last.traffic.received[rank] // of_kv
    of_q = case.heads * HEAD_DIM
    rows = own * (2 * (2 * of_q * 2 + of_kv) + case.heads * 4 + of_q * 4) + fetched * 2 * of_kv
    return alive.most / rows
