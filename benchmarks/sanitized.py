"""One small call of every kind of generated kernel, with gradients where it has them: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitized
    compute-sanitizer --tool racecheck python -m benchmarks.sanitized --only "fixed order"

Compile first by a run without the sanitizer: under it the compiler is slow. Results are held to the tolerance rule.
Processes with `--part 0/8` to `--part 7/8` share the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch

import composattn as ca
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.mods import alibi, causal, document, sliding_window
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case

ON_GPU: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def cases() -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """(name, case, options of the call)."""
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    table = torch.randn(4, 800, device="cuda", requires_grad=True)
    ids = torch.arange(400, device="cuda") // 90

    def dense(length: int, dim: int, **options: Any) -> Case:
        return make_case(0, batch=1, kv_heads=2, q_len=length, dim=dim, **options, **ON_GPU)

    for dim, v_dim in ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)):
        yield f"causal, D {dim}/{v_dim}", dense(333, dim, v_dim=v_dim, mask_mod=causal()), {}
    for dim in (96, 128):
        yield f"a fixed order, D {dim}", dense(333, dim, mask_mod=causal()), {"deterministic": True}
    for dim in (64, 128):
        staying = {"schedule": ca.Schedule(persistent=True)}
        yield f"blocks that stay, D {dim}", dense(333, dim, mask_mod=causal()), staying
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    plain = dense(333, 128, mask_mod=causal())
    yield "sinks and dropout", dataclasses.replace(plain, sinks=sinks, dropout=(0.1, 7)), {}
    # a query has to see 770 keys and more before maxima are guessed
    yield "guessed maxima", dense(1700, 96, mask_mod=causal()), {}
    yield "wide heads", dense(333, 512, mask_mod=causal()), {}
    yield "wide heads, V narrower", dense(200, 576, v_dim=512, mask_mod=causal()), {}
    yield "ALiBi with its gradient", dense(300, 64, score_mod=alibi(slopes), mask_mod=causal()), {}
    relative = dense(400, 64, score_mod=lambda s, b, h, q, kv: s + table[h, q - kv + 400])
    yield "a table by distance with its gradient", relative, {}
    yield "documents, a window", dense(400, 128, mask_mod=document(ids) & sliding_window(70)), {}
    holes = dense(700, 128, mask_mod=lambda b, h, q, kv: ((q // 128) + (kv // 128)) % 2 == 0)
    yield "lists of tiles", holes, {}
    packed = make_varlen_case(0, (130, 1, 269), kv_heads=2, dim=128, mask_mod=causal(), **ON_GPU)
    yield "packed sequences", packed, {}
    decoding = make_case(
        0, batch=1, heads=8, kv_heads=2, q_len=1, kv_len=3000, dim=128, gradients=False, **ON_GPU
    )  # fmt: skip
    yield "one query, keys in parts", decoding, {}
    paged = make_paged_case(
        0, (301, 384), page_size=64, q_len=5, heads=8, kv_heads=2, dim=128, mask_mod=causal(), **ON_GPU
    )  # fmt: skip
    yield "keys in pages", paged, {}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", help="regular expression on the case's name")
    made.add_argument("--part", default="0/1", help="every n-th case, from the i-th on: i/n, for several processes")
    made.add_argument("--backend", choices=ARCHITECTURES, help="default: the GPU's")
    given = made.parse_args()
    torch.manual_seed(0)
    wrong, backend = 0, given.backend or ca.backends.default_for(torch.device("cuda"))
    kernels, (first, step) = ARCHITECTURES[backend], map(int, given.part.split("/"))
    for name, case, options in itertools.islice(cases(), first, None, step):
        widest = max(case.q.shape[-1], case.v.shape[-1])
        if not re.search(given.only, name) or widest > kernels.max_head_dim:
            continue
        attend = functools.partial(ca.attention, backend=backend, **options)
        try:
            learns = widest <= kernels.max_gradient_dim
            check(attend, case if learns else case.without_gradients())
            print(f"{name}: right", flush=True)
        except AssertionError as error:
            wrong += 1
            print(f"{name}: WRONG\n{error}", flush=True)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
