"""A decode of a latent cache of bytes whose kernel leaves things out: what of its time is what, on a GPU.

    python -m benchmarks.byte_skeleton --out benchmarks/results/eight-bits/h200-byte-keys-wide-skeleton.json

D 576 and 512, 16 sequences of 32k and of 64k keys, so that by the difference the loop over keys is known from the ends.
Each form is timed in a process of its own, beside 16 bits, with kernels kept apart: plans know nothing of forms. What
is left out leaves nonsense, but reads, waits, parts of the keys and the kernel behind are the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

import composattn as ca
from benchmarks.byte_caches import Shape, drawn
from benchmarks.provenance import provenance
from benchmarks.run import Row, save
from benchmarks.timing import Call, Stopwatch, captured, interleaved
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.hopper import forward_wide_of_bytes as kernels
from composattn.backends.hopper.wgmma import ROWS, put
from composattn.primitives.values import narrowed

FORMS = {
    "all": (),
    "no softmax": ("softmax",),
    "reads and products": ("softmax", "conversion"),
    "reads": ("softmax", "conversion", "products"),
}
LEFT_OUT: set[str] = set()
KERNEL = "forward_wide_of_bytes"
HEADS, KEYS = (16, 64, 128), (32768, 65536)


class Products(kernels.TurnedProducts):
    def issue_scores(self, sums, keys, j):
        if "products" not in LEFT_OUT:
            super().issue_scores(sums, keys, j)
            return
        for n in range(cute.size(sums)):
            sums[n] = _number(keys, n) + (sums[n] if j else 0.0)

    def issue_output(self, sums, values, i, accumulate):
        if "products" not in LEFT_OUT:
            super().issue_output(sums, values, i, accumulate)
            return
        for n in range(cute.size(sums)):
            sums[n] = sums[n] + _number(values[n % len(values)], n // len(values))


def _number(left: cute.Tensor, n: int) -> Float32:
    """Words that were read must be of use, else nobody reads them."""
    return cute.recast_tensor(left, Float32)[n % (cute.size(left) // 2)]


class Consumer(kernels.ByteConsumer):
    def as_left(self, words, which):
        if "conversion" not in LEFT_OUT:
            return super().as_left(words, which)
        left = self.products.left(8 * len(words))
        registers = cute.recast_tensor(left, Int32)
        for n in range(cute.size(registers)):
            registers[n] = words[n // 2]
        return left


class Rows(kernels.TurnedRows):
    def turn(self, sums, registers, together):
        if together or "softmax" not in LEFT_OUT:
            super().turn(sums, registers, together)
            return
        for n in range(cute.size(registers)):
            registers[n] = sums[n % cute.size(sums)]

    def probabilities(self, tSrS, n, ahead, tested, seen, first):
        if "softmax" not in LEFT_OUT:
            super().probabilities(tSrS, n, ahead, tested, seen, first)
            return
        if first:
            self.softmax.total.fill(1.0)
        me = self.me
        place = cute.local_tile(self.block.sP, (ROWS, self.tiling.key_box[0]), (0, me.number))
        put(self.products.qk, narrowed(tSrS, self.block.dtype), place, me.thread)
        cute.arch.fence_view_async_shared()
        me.sync_consumers()

    def rescale_sums(self):
        if "softmax" not in LEFT_OUT:
            super().rescale_sums()


class Skeleton(kernels.HopperForwardWideOfBytes):
    def products(self, block, number):
        return Products(self.tiling, block, number, self.fragment.rows, self.mods.changes_scores)

    def consumer(self, block, thread, scale_log2):
        return Consumer(self, block, thread, scale_log2)

    def rows_of(self, me, work, leaves):
        return Rows(me, self.mods, work, leaves)


CALLS: dict[str, Call] = {}


def prepare(form: str) -> None:
    """Compiles a form, in a process that does nothing else."""
    LEFT_OUT.update(FORMS[form])
    hopper = ARCHITECTURES["hopper"]
    ARCHITECTURES["hopper"] = dataclasses.replace(hopper, kernels=lambda: {**hopper.kernels(), KERNEL: Skeleton})
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["COMPOSATTN_CACHE_DIR"] = folder
        for heads, keys in itertools.product(HEADS, KEYS):
            shape = Shape(16, (heads, 1), 1, keys, (576, 512))
            q, k, v = drawn(shape, torch.device("cuda"), 0)
            CALLS[f"{shape}, {form}"] = captured(functools.partial(ca.Attention(), q, k, v))
            if not LEFT_OUT:
                wide = (t.to(q.dtype) for t in (k, v))
                CALLS[f"{shape}, 16 bits"] = captured(functools.partial(ca.Attention(), q, *wide))


def timed(rounds: int) -> list[Row]:
    """Rows of the process's form."""
    times = interleaved(CALLS, Stopwatch(torch.device("cuda")), rounds=rounds, sample_ms=3.0)
    return [{"row": name, "impl": name.split(", ")[1], "ms": t.ms, "spread": t.spread} for name, t in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    result: dict[str, Any] = {**provenance(torch.device("cuda")), "rows": rows}
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pools = [stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)) for _ in FORMS]
        for made in [pool.submit(prepare, form) for pool, form in zip(pools, FORMS, strict=True)]:
            made.result()
        for pool in pools:
            for row in pool.submit(timed, options.rounds).result():
                print(f"{row['row']:70} {row['ms'] * 1e3:8.1f} us", flush=True)
                rows.append(row)
            save(result, options.out)


if __name__ == "__main__":
    main()
