"""One sequence on several GPUs: this package's context parallel beside torch's, and beside gathering all keys.

    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --out FILE.jsonl --budget 140
    torchrun --nproc-per-node 4 -m benchmarks.context_parallel --only check                    # against one GPU

A row is a forward and a backward: the median over rounds of the slowest rank's time, between two barriers, by the
GPU's own clock. `scaling` is the time on one GPU over that time and the number of ranks. Peers:

    ring      torch.distributed.tensor.experimental.context_parallel with scaled_dot_product_attention; causal alone
    flex      FlexAttention on head-and-tail rows of each rank and all gathered keys, as torch's own does it
    fa4       flash-attn-4 on the same rows and keys: per rank two runs of queries, documents as packed sequences
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import composattn as ca
from composattn.mods import causal, document, sliding_window

T = torch.Tensor
Step = Callable[[], tuple[T, ...]]
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
        """Of the documents, log-normal; a fixed draw."""
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
        """Of a forward and a backward."""
        return 3.5 * 4 * self.pairs * self.heads * HEAD_DIM

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[T, T, T, T]:
        """q, k, v and the gradient of out, (1, H, S, D) as views of (1, S, H, D)."""
        generator = torch.Generator(device).manual_seed(1)
        made = (
            torch.randn(1, self.seq_len, h, HEAD_DIM, generator=generator, device=device, dtype=dtype).transpose(1, 2)
            for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        return tuple(made)  # type: ignore[return-value]


def here() -> torch.device:
    """This process's GPU; a CPU, where there is none, to try the checks."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def leaves(*tensors: T) -> list[T]:
    return [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in tensors]


# --- who is measured ------------------------------------------------------------------------------------------


def ours_alone(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    attn = ca.Attention(mask_mod=case.mask_of(device))
    *qkv, grad = case.tensors(device, dtype)
    q, k, v = leaves(*qkv)
    return lambda: torch.autograd.grad(attn(q, k, v), (q, k, v), grad)


def ours(
    case: Case, device: torch.device, dtype: torch.dtype, moves_nothing: bool = False, **options: Any
) -> tuple[Step, ca.parallel.Shard]:
    """`moves_nothing`: each rank computes its share on zeros in place of what it would fetch."""
    if moves_nothing:
        return _step(case, apart(dist.get_rank(), dist.get_world_size(), **options))
    return _step(case, ca.ContextParallel(dist.group.WORLD, **options))


def _step(case: Case, cp: ca.ContextParallel) -> tuple[Step, ca.parallel.Shard]:
    device, dtype = here(), torch.bfloat16
    attn = ca.Attention(mask_mod=case.mask_of(device))
    shard = cp.plan(attn, case.seq_len)
    *qkv, grad = (shard.scatter(t, 2) for t in case.tensors(device, dtype))
    q, k, v = leaves(*qkv)
    (grad,) = leaves(grad)
    return lambda: torch.autograd.grad(attn(q, k, v, context_parallel=shard), (q, k, v), grad.detach()), shard


class _Gathered(torch.autograd.Function):
    """All ranks' rows of (1, H, rows, D), one after the other; gradients are reduced and scattered."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        rows = x.permute(2, 0, 1, 3).contiguous()
        found = rows.new_empty((dist.get_world_size() * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(found, rows)
        return found.permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        rows = grad.permute(2, 0, 1, 3).contiguous()
        found = rows.new_empty((rows.shape[0] // dist.get_world_size(), *rows.shape[1:]))
        dist.reduce_scatter_tensor(found, rows)
        return found.permute(1, 2, 0, 3)


def head_and_tail(case: Case, rank: int, ranks: int, device: torch.device) -> tuple[T, T]:
    """Positions of this rank's rows, and of all ranks' one after the other."""
    chunks = torch.arange(case.seq_len, device=device).view(2 * ranks, -1)
    each = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    return each[rank], torch.cat(each)


def flex(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mine, everyone = head_and_tail(case, dist.get_rank(), dist.get_world_size(), device)
    ids = case.ids(device)

    def mask_mod(b: T, h: T, q: T, kv: T) -> T:
        q, kv = mine[q], everyone[kv]
        if case.mask == "causal":
            return q >= kv
        if case.mask == "window":
            return (q >= kv) & (q - kv < WINDOW)
        return (q >= kv) & (ids[q] == ids[kv])

    block_mask = create_block_mask(mask_mod, None, None, len(mine), case.seq_len, device=device, _compile=True)
    attend = torch.compile(flex_attention, dynamic=False)
    *qkv, grad = (t.index_select(2, mine) for t in case.tensors(device, dtype))
    q, k, v = (t.detach().contiguous().requires_grad_() for t in qkv)

    def step() -> tuple[T, ...]:
        out = attend(q, _Gathered.apply(k), _Gathered.apply(v), block_mask=block_mask, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    return step


def fa4(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, everyone = head_and_tail(case, rank, ranks, device)
    back = torch.empty_like(everyone)
    back[everyone] = torch.arange(case.seq_len, device=device)
    starts = torch.tensor([0, *case.lengths]).cumsum(0)
    *qkv, grad = (t.index_select(2, mine) for t in case.tensors(device, dtype))
    q, k, v = leaves(*qkv)
    half = len(mine) // 2

    def of_run(q_run: T, k_all: T, v_all: T, first: int) -> T:
        stop = first + half
        if case.mask == "causal":
            return flash_attn_func(q_run, k_all[:, :stop], v_all[:, :stop], causal=True)[0]
        if case.mask == "window":
            low = max(0, first - WINDOW + 1)
            window = (WINDOW - 1, 0)
            return flash_attn_func(q_run, k_all[:, low:stop], v_all[:, low:stop], causal=False, window_size=window)[0]
        inside = starts[(starts > first) & (starts < stop)]
        low = int(starts[starts <= first].max())
        q_ends, k_ends = (
            torch.cat([torch.tensor([0]), inside - at, torch.tensor([stop - at])]).int() for at in (first, low)
        )
        out = flash_attn_varlen_func(
            q_run[0], k_all[0, low:stop], v_all[0, low:stop], cu_seqlens_q=q_ends.to(device),
            cu_seqlens_k=k_ends.to(device), max_seqlen_q=int(q_ends.diff().max()),
            max_seqlen_k=int(k_ends.diff().max()), causal=True,
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out).unsqueeze(0)

    def step() -> tuple[T, ...]:
        k_all, v_all = (_Gathered.apply(x).transpose(1, 2).index_select(1, back) for x in (k, v))
        rows = q.transpose(1, 2)
        runs = (of_run(rows[:, i * half : (i + 1) * half], k_all, v_all, int(mine[i * half])) for i in range(2))
        return torch.autograd.grad(torch.cat(list(runs), 1).transpose(1, 2), (q, k, v), grad)

    return step


def ring(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    """Keys are repeated for their query heads: torch's ring takes as many of both."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.mask != "causal":
        raise NotImplementedError("causal alone")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    *qkv, grad = case.tensors(device, dtype)
    buffers = [t.contiguous() for t in (*qkv, grad)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        q, k, v, dout = (t.clone() for t in buffers)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    group = case.heads // case.kv_heads
    empty = torch.zeros(dist.get_world_size() * 2, device=device)

    def step() -> tuple[T, ...]:
        with (
            context_parallel(mesh, buffers=[empty.clone()], buffer_seq_dims=[0]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            k_all, v_all = (t.repeat_interleave(group, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout)

    return step


# --- measuring ------------------------------------------------------------------------------------------------


def timed(step: Step, rounds: int) -> list[float]:
    """Milliseconds of the slowest rank, round by round."""
    found = []
    for n in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if n >= 2:
            found.append(float(slowest))
    return found


def measure(name: str, case: Case, step: Step, rounds: int, extra: dict[str, Any]) -> dict[str, Any]:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    step()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    times = timed(step, rounds)
    median = statistics.median(times)
    return {
        "name": name, "mask": case.mask, "seq_len": case.seq_len, "ranks": dist.get_world_size(), "ms": median,
        "least_ms": min(times), "most_ms": max(times),
        "tflops_a_rank": case.flops / median / 1e9 / dist.get_world_size(),
        "issue_ms": issued * 1e3, "held_bytes": before, "peak_bytes": peak, **extra,
    }  # fmt: skip


def facts_of(shard: Any) -> dict[str, Any]:
    """What was planned, of the attention that ran last."""
    planned = shard._last
    way, traffic = planned.way, planned.traffic
    parts = getattr(way, "parts", [])
    return {
        "method": traffic.method, "parts": traffic.parts, "received_bytes": list(traffic.received),
        "imbalance": shard.division.imbalance, "runs": shard.division.runs,
        "pieces": [len(p.part.pieces) for p in parts],
        "tables": sum(piece.first is None for p in parts for piece in p.part.pieces),
    }  # fmt: skip


PEERS = {"flex": flex, "fa4": fa4, "ring": ring}
OURS: dict[str, tuple[dict[str, Any], ...]] = {
    "causal": ({}, {"method": "exchange", "parts": 2}, {"method": "heads"}),
    "window": ({}, {"parts": 2}),
    "documents": ({}, {"parts": 2}),
}


class Run:
    """Rows as they come, and where each rank is: by the clock, to its own file, so that a hang can be placed."""

    def __init__(self, out: str | None, budget: float) -> None:
        self.begin, self.budget, self.out = time.perf_counter(), budget, out
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.trace = open(f"{out}.rank{self.rank}", "a") if out else sys.stderr  # noqa: SIM115

    def at(self, what: str) -> None:
        print(f"{time.perf_counter() - self.begin:7.2f} {what}", file=self.trace, flush=True)

    def over(self) -> bool:
        """Whether the time is up, which all ranks must say alike."""
        late = torch.tensor([float(time.perf_counter() - self.begin > self.budget)], device=here())
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def write(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            print(json.dumps(row), flush=True)
            if self.out:
                with open(self.out, "a") as file:
                    file.write(json.dumps(row) + "\n")

    def row(self, name: str, case: Case, job: Callable[[], dict[str, Any]]) -> None:
        """What a job measures, or its error."""
        self.at(f"{case.mask} {name}")
        try:
            found = job()
        except Exception as error:
            found = {"name": name, "mask": case.mask, "error": f"{type(error).__name__}: {error}"[:800]}
            self.at(traceback.format_exc())
        self.write(found)
        torch.cuda.empty_cache()


def compile_apart(run: Run, cases: list[Case]) -> None:
    """Each rank compiles some of the kernels, by a share of the work on zeros; the others find them on disk."""
    jobs: list[tuple[Case, int | None, dict[str, Any]]] = []
    for case in cases:
        jobs.append((case, None, {}))
        jobs += [(case, rank, options) for options in OURS[case.mask] for rank in (0, run.size - 1)]
    for n, (case, rank, options) in enumerate(jobs):
        if n % run.size == run.rank:
            run.at(f"compiles {case.mask} of {rank} {options}")
            try:
                share(case, rank, run.size, options)()
            except Exception:
                run.at(traceback.format_exc())
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    run.at("compiled its part")


def ours_beside_one(run: Run, case: Case, rounds: int) -> None:
    """One GPU, then all of them in each way, with the relative errors between them."""
    device, dtype = here(), torch.bfloat16
    alone: dict[str, Any] = {}

    def one() -> dict[str, Any]:
        step = ours_alone(case, device, dtype)
        alone["grads"] = step()
        return measure("ours, one GPU", case, step, 3, {})

    def several(name: str, options: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        step, shard = ours(case, device, dtype, **options)
        run.at("planned")
        found = step()
        torch.cuda.synchronize()
        run.at("first step done")
        extra = {"first_s": time.perf_counter() - begin, **facts_of(shard)}
        if "grads" in alone:
            pairs = zip(found, (shard.scatter(g, 2) for g in alone["grads"]), strict=True)
            apart = torch.tensor([float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs])
            worst = apart.to(device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            extra["errors_dq_dk_dv"] = worst.tolist()
        return measure(name, case, step, rounds, extra)

    def computing(name: str, options: dict[str, Any]) -> dict[str, Any]:
        step, _ = ours(case, device, dtype, True, **options)
        return measure(name, case, step, 3, {})

    run.row("ours, one GPU", case, one)
    for options in OURS[case.mask]:
        name = f"ours {options or 'auto'}"
        run.row(name, case, functools.partial(several, name, options))
    run.row("ours, nothing moved", case, functools.partial(computing, "ours, nothing moved", {}))


def peer(run: Run, name: str, case: Case, rounds: int) -> None:
    def job() -> dict[str, Any]:
        return measure(name, case, PEERS[name](case, here(), torch.bfloat16), rounds, {})

    run.row(name, case, job)


def everything(run: Run, seq_len: int, rounds: int, only: str | None) -> None:
    """In order of worth, until the time is up."""
    cases = {mask: Case(mask, seq_len) for mask in ("causal", "window", "documents")}
    steps: list[tuple[str, Callable[[], None]]] = [("compile", lambda: compile_apart(run, list(cases.values())))]
    for mask in ("documents", "window", "causal"):
        steps.append(("ours", functools.partial(ours_beside_one, run, cases[mask], rounds)))
    steps.append(("flex", lambda: peer(run, "flex", cases["documents"], 3)))
    steps.append(("check", lambda: check(run, seq_len // 16)))
    for name, mask in (
        ("fa4", "documents"),
        ("fa4", "causal"),
        ("fa4", "window"),
        ("ring", "causal"),
        ("flex", "window"),
    ):
        steps.append((name, functools.partial(peer, run, name, cases[mask], 3)))
    for name, step in steps:
        if only is not None and name not in only.split(","):
            continue
        if run.over():
            run.at("the time is up")
            return
        run.at(f"== {name}")
        step()


# --- against one GPU --------------------------------------------------------------------------------------------


def check(run: Run, length: int) -> None:
    """Forward, gradients and captured gradients of all ranks against one GPU's, by relative norms."""
    device, dtype, ranks = here(), torch.bfloat16, run.size
    bias = torch.randn(8, 2 * 32768, generator=torch.Generator(device).manual_seed(2), device=device).requires_grad_()

    def relative(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[h, q - kv]

    odd = ranks * 37 * max(1, length // 128)
    for mask, rows, score, options in (
        ("documents", length, relative, {"parts": 2}),
        ("causal", length, relative, {"method": "exchange", "parts": 1}),
        ("causal", odd, None, {"method": "exchange", "parts": 3, "keep_fetched": False}),
        ("window", odd, None, {"parts": 2}),
        ("documents", odd, None, {"method": "gather"}),
        ("causal", length, None, {"method": "heads"}),
    ):
        if run.over():
            return
        case = Case(mask, rows, 8, 4)
        row: dict[str, Any] = {"check": mask, "seq_len": rows, "bias": score is not None, **options}
        run.at(f"check {row}")
        try:
            attn = ca.Attention(mask_mod=case.mask_of(device), score_mod=score)
            *qkv, grad = case.tensors(device, dtype)
            whole = leaves(*qkv)
            more = [bias] if score else []
            wanted = attn(*whole)
            gradients = torch.autograd.grad(wanted, whole + more, grad)
            cp = ca.ContextParallel(dist.group.WORLD, timeout=60, **options)
            shard = cp.plan(attn, rows)
            mine = leaves(*(shard.scatter(t, 2) for t in qkv))
            bits = []
            for _ in range(2):
                with cp:
                    got = attn(*mine)
                    found = torch.autograd.grad(got, mine + more, shard.scatter(grad, 2))
                bits.append([got.detach(), *found])
            row["same_bits"] = all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
            pairs = [
                (got.detach(), shard.scatter(wanted.detach(), 2)),
                *zip(found[:3], (shard.scatter(g, 2) for g in gradients[:3]), strict=True),
            ]
            pairs += [(a, b) for a, b in zip(found[3:], gradients[3:], strict=True)]
            row["errors"] = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
            row |= facts_of(shard)
            row["ok"] = max(row["errors"]) < 1e-2
        except Exception as error:
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:800]}
            run.at(traceback.format_exc())
        ok = torch.tensor([int(row["ok"])], device=device)
        dist.all_reduce(ok, dist.ReduceOp.MIN)
        row["ok_on_all"] = bool(ok)
        run.write(row)


# --- kernels, compiled before ------------------------------------------------------------------------------------


class Nobody:
    """Ranks that are not there: what would come is zero. To compile, and to time the computation of one rank alone."""

    backend, device_type, timeout, moved_bytes = "none", "any", None, 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def check_device(self, device: torch.device) -> None:
        pass

    def exchange(self, send: T, sends: list[int], receives: list[int], into: T | None = None) -> Any:
        return _There(send.new_zeros((sum(receives), *send.shape[1:])) if into is None else into.zero_())

    def gather(self, rows: T) -> Any:
        return _There(rows.new_zeros((self.size * rows.shape[0], *rows.shape[1:])))

    def total(self, numbers: T, kind: Any = None) -> T:
        return numbers

    def said_by_all(self, numbers: T) -> T:
        return numbers.cpu().expand(self.size, -1)


class _There:
    def __init__(self, rows: T) -> None:
        self.rows = rows

    def arrived(self) -> T:
        return self.rows


def apart(rank: int, size: int, **options: Any) -> ca.ContextParallel:
    """A context parallel of one process that stands for one of `size` ranks."""
    cp = ca.ContextParallel.__new__(ca.ContextParallel)
    cp.ranks = Nobody(rank, size)  # type: ignore[assignment]
    cp.method, cp.parts, cp.keep_fetched = options.get("method", "auto"), options.get("parts"), True
    cp.captured_gradients, cp._shard = "whole", None
    return cp


def share(case: Case, rank: int | None, size: int, options: dict[str, Any]) -> Step:
    """The step of one rank's share, or of all of it, with nothing moved."""
    if rank is None:
        return ours_alone(case, here(), torch.bfloat16)
    return _step(case, apart(rank, size, **options))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="of compile, ours, check, flex, fa4, ring: those, by commas")
    parser.add_argument("--seq-len", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no step begins")
    parser.add_argument("--out", help="a file that rows are appended to, a JSON object each")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(25, repeat=True)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl", device_id=here())
    else:
        dist.init_process_group("gloo")
    run = Run(options.out, options.budget)
    run.at("process group")
    dist.all_reduce(torch.ones(1, device=here()))
    run.at("first reduction")
    everything(run, options.seq_len, options.rounds, options.only)
    run.at("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
