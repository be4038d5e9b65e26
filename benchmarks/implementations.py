"""Who is measured: how each implementation is told a case, and which cases it has no words for."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import flash_attention_3
from benchmarks.cases import Case, Pattern

Forward = Callable[..., Any]
OURS = "composattn"
DETERMINISTIC = "composattn, fixed order"
PACKED = "composattn varlen"
PACKED_IN_ORDER = "composattn varlen, fixed order"
GEMM_SIZE = 8192
GEMM = f"cuBLAS GEMM {GEMM_SIZE}"
BARE = "bare launches"  # our kernels and memory in a bare autograd.Function, nothing else
FLOOR = "floor"  # the same Function without kernels: it allocates what it returns


class NotServed(Exception):
    """This implementation has no way to say this case; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """One case's tensors, layout (B, H, S, D), contiguous; `grad` has the shape of the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True)
class Job:
    """A case made ready for one implementation: leaves in its own layout, and its way back to (B, H, S, D)."""

    forward: Forward
    leaves: tuple[torch.Tensor, ...]
    grad: torch.Tensor
    to_common: Callable[[torch.Tensor], torch.Tensor]
    learned: tuple[torch.Tensor, ...] = ()


class Implementation(Protocol):
    @property
    def name(self) -> str: ...

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job: ...


@dataclass(frozen=True)
class Pages:
    """Keys and values of a case in pages of a cache (pages, page_size, H, D), drawn in no order."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor  # int32 (B, pages of a sequence)
    used: torch.Tensor  # int32 (B,)

    @staticmethod
    def of(case: Case, inputs: Inputs) -> Pages:
        count = -(-case.kv_len // case.page_size)
        table = torch.randperm(case.batch * count, device=inputs.k.device).view(case.batch, count)

        def cache(t: torch.Tensor) -> torch.Tensor:
            rows = F.pad(t.transpose(1, 2), (0, 0, 0, 0, 0, count * case.page_size - case.kv_len))
            pages = rows.reshape(-1, case.page_size, *rows.shape[2:])
            return torch.empty_like(pages).index_copy_(0, table.flatten(), pages)

        used = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=table.device)
        return Pages(cache(inputs.k), cache(inputs.v), table.to(torch.int32), used)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _leaves(case: Case, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Leaves of an implementation's own for gradients; in the forward all of one layout read the same memory.

    A decode's time differs by 1 to 3 % with where keys lie (H200; 1 GiB each of K and V).
    """
    q, k, v = (t.detach() if case.direction == "forward" else t.detach().clone().requires_grad_() for t in tensors)
    return (q, k, k[..., : case.v_dim]) if case.latent else (q, k, v)


def _job(case: Case, inputs: Inputs, forward: Forward, learned: tuple[torch.Tensor, ...] = ()) -> Job:
    return Job(forward, _leaves(case, inputs.q, inputs.k, inputs.v), inputs.grad, _same, learned)


@dataclass(frozen=True)
class Composattn:
    """This package, from the plain callables of the case."""

    backend: str | None = None
    deterministic: bool = False
    packed: bool = False  # documents as sequences of a packed call, not as a mask

    @property
    def name(self) -> str:
        if self.packed:
            return PACKED_IN_ORDER if self.deterministic else PACKED
        return DETERMINISTIC if self.deterministic else OURS

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        import composattn as ca
        from composattn.mods import causal

        if self.deterministic and case.direction == "forward":
            raise NotServed("a forward always gives the same bits")
        if self.packed:
            if not pattern.document_starts:
                raise NotServed("has no documents to pack")
            mask = causal() if pattern.causal else None
            of_each = ca.Attention(mask_mod=mask, backend=self.backend, deterministic=self.deterministic)
            return _packed(case, pattern, inputs, lambda q, k, v, starts, _: of_each(q, k, v, varlen=ca.Varlen(starts)))
        attention = ca.Attention(
            score_mod=pattern.score_mod,
            mask_mod=pattern.mask_mod,
            backend=self.backend,
            deterministic=self.deterministic,
        )
        if case.page_size:
            pages = Pages.of(case, inputs)
            paged = ca.Paged(pages.table, case.page_size, pages.used)
            forward = functools.partial(attention, paged=paged)
            return Job(forward, (inputs.q, pages.k.transpose(1, 2), pages.v.transpose(1, 2)), inputs.grad, _same)
        return _job(case, inputs, attention, pattern.learned)


@dataclass(frozen=True)
class TorchSdpa:
    """torch.nn.functional.scaled_dot_product_attention held to one of its backends, or left to choose."""

    name: str
    backend: SDPBackend | None

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        if not pattern.is_plain:
            raise NotServed(f"no argument for {pattern.name} but a dense mask")
        if case.page_size:
            raise NotServed("keys in pages")
        if pattern.causal and case.q_len != case.kv_len:
            raise NotServed("is_causal is aligned to the first key")

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=pattern.causal, enable_gqa=case.kv_heads != case.heads
            )

        backend = self.backend
        if backend is None:
            return _job(case, inputs, forward)

        def held(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return forward(q, k, v)

        return _job(case, inputs, held)


@dataclass(frozen=True)
class FlexAttention:
    """torch's FlexAttention, compiled on a GPU, from the same plain callables and its own block mask."""

    name: str = "FlexAttention"

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        import torch._functorch.config as functorch_config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if case.page_size:
            raise NotServed("pages are a conversion of the mask on the user's side")
        device = inputs.q.device
        block_mask = None
        if pattern.mask_mod is not None:
            block_mask = create_block_mask(
                pattern.mask_mod, B=None, H=None, Q_LEN=case.q_len, KV_LEN=case.kv_len, device=device
            )
        call: Callable[..., Any] = flex_attention
        if device.type == "cuda" or "cpu" in case.sets:
            # A timed backward runs many times over one forward.
            functorch_config.donated_buffer = False
            torch._dynamo.reset()
            # Beyond this many cases a process it computes unfused, 50 times as slow, and says so in a log alone.
            torch._dynamo.config.recompile_limit = 256
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            call = torch.compile(flex_attention, dynamic=False)
        elif case.direction == "backward":
            raise NotServed("no backward on a CPU")
        forward = functools.partial(
            call, score_mod=pattern.score_mod, block_mask=block_mask, enable_gqa=case.kv_heads != case.heads
        )
        if pattern.learned:
            # A mod that reads memory doesn't fit with the default count of pipeline stages: shared memory runs out.
            forward.keywords["kernel_options"] = {"num_stages": 1}
        if max(case.dim, case.v_dim) > 256:
            # Its own choice takes more shared memory than there is, backward it runs; of four, and of five that run
            # backward, these are the fastest (H200).
            keys, stages = (64, 1) if pattern.mask_mod is None else (32, 2)
            m1, n1, m2, n2, warps, backward_stages = (
                (32, 32, 32, 32, 8, 1) if pattern.mask_mod is None else (16, 32, 32, 16, 4, 2)
            )
            forward.keywords["kernel_options"] = {
                "fwd_BLOCK_M": 64, "fwd_BLOCK_N": keys, "fwd_num_warps": 8, "fwd_num_stages": stages,
                "bwd_BLOCK_M1": m1, "bwd_BLOCK_N1": n1, "bwd_BLOCK_M2": m2, "bwd_BLOCK_N2": n2,
                "bwd_num_warps": warps, "bwd_num_stages": backward_stages,
            }  # fmt: skip
        return _job(case, inputs, forward, pattern.learned)


@dataclass(frozen=True)
class FlashAttention4:
    """The flash-attn-4 wheel (CuTe); layout (B, S, H, D). ALiBi is a function written in its kernel language."""

    name: str = "flash-attn-4"

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        if case.dtype not in (torch.bfloat16, torch.float16):
            raise NotServed("16-bit types only")
        if pattern.prefix or pattern.step > 1 or pattern.grid:
            raise NotServed("needs a mask in its kernel language and block lists of the user's making")
        if pattern.learned:
            raise NotServed("gives no gradient of a captured tensor, and wants the score mod in its kernel language")
        if pattern.score_mod is not None and not pattern.softcap and pattern.alibi_slopes is None:
            raise NotServed("wants the score mod in its kernel language")
        if pattern.document_starts:
            return self._documents(case, pattern, inputs)
        from flash_attn.cute import flash_attn_func

        if case.page_size:
            return self._paged(case, inputs)
        options: dict[str, Any] = {"causal": pattern.causal}
        if pattern.left_window is not None:
            options = {"causal": False, "window_size": (pattern.left_window, 0)}
        if pattern.softcap:
            options["softcap"] = pattern.softcap
        if pattern.alibi_slopes is not None:
            if case.direction == "backward":
                raise NotServed("the gradient of a score mod has to be written by hand")
            options["score_mod"] = cute_alibi(case.heads)
        if case.measure == "tbps":
            options["num_splits"] = 0  # as its heuristic says

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _first(flash_attn_func(q, k, v, **options))

        turned = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.grad)]
        return Job(forward, _leaves(case, *turned[:3]), turned[3], lambda t: t.transpose(1, 2))

    def _paged(self, case: Case, inputs: Inputs) -> Job:
        from flash_attn.cute import flash_attn_varlen_func

        pages = Pages.of(case, inputs)

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _first(flash_attn_varlen_func(q, k, v, page_table=pages.table, seqused_k=pages.used, num_splits=0))

        q, grad = (t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.grad))
        return Job(forward, (q, pages.k, pages.v), grad, lambda t: t.transpose(1, 2))

    def _documents(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        from flash_attn.cute import flash_attn_varlen_func

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
            ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return _first(flash_attn_varlen_func(q, k, v, **ends, causal=pattern.causal))

        return _packed(case, pattern, inputs, call)


@dataclass(frozen=True)
class FlashAttention3:
    """flash-attention's kernels for Hopper, as vLLM builds them (`flash_attention_3.py`); layout (B, S, H, D)."""

    name: str = "flash-attn-3"

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        if case.dtype not in (torch.bfloat16, torch.float16):
            raise NotServed("16-bit types only")
        if case.direction == "backward":
            raise NotServed("the build has a forward alone")
        arguments = pattern.score_mod is None or bool(pattern.softcap)
        if not arguments or pattern.prefix or pattern.step > 1 or pattern.grid:
            raise NotServed(f"no argument for {pattern.name}")
        if case.page_size or max(case.dim, case.v_dim) > 256:
            raise NotServed("keys in pages, or D above 256")
        if pattern.document_starts:
            return _packed(case, pattern, inputs, functools.partial(self._documents, is_causal=pattern.causal))
        options: dict[str, Any] = {"is_causal": pattern.causal, "softcap": pattern.softcap}
        if pattern.left_window is not None:
            options |= {"is_causal": False, "window_size_left": pattern.left_window, "window_size_right": 0}
        turned = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.grad)]
        forward = functools.partial(flash_attention_3.forward, **options)
        return Job(forward, _leaves(case, *turned[:3]), turned[3], lambda t: t.transpose(1, 2))

    @staticmethod
    def _documents(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, is_causal: bool
    ) -> torch.Tensor:
        ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return flash_attention_3.forward(q, k, v, **ends, is_causal=is_causal)


@dataclass(frozen=True)
class CudnnFlex:
    """cudnn.flex_attention of nvidia-cudnn-frontend: masks as intervals of keys that a query sees, told row by row."""

    name: str = "cudnn.flex"

    def prepare(self, case: Case, pattern: Pattern, inputs: Inputs) -> Job:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        if pattern.score_mod is not None:
            raise NotServed("no score mods")
        if case.page_size or case.measure == "tbps":
            raise NotServed("no decoding")
        turned = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k, inputs.v, inputs.grad)]
        ends = interval_ends(case, pattern, inputs.q.device).repeat(1, case.batch)[None].contiguous()
        plan = create_mask_plan(ends, *turned[:3], build_backward=case.direction == "backward")
        forward = functools.partial(flex_attn_func, mask_plan=plan)
        return Job(forward, _leaves(case, *turned[:3]), turned[3], lambda t: t.transpose(1, 2))


def interval_ends(case: Case, pattern: Pattern, device: torch.device) -> torch.Tensor:
    """int32 (odd, Sq): F0, F1, ... of each query, which sees the keys [0, F0) and [F1, F2) and so on."""
    q, kv = torch.arange(case.q_len, device=device), torch.arange(case.kv_len, device=device)
    if pattern.mask_mod is None:
        return torch.full((1, case.q_len), case.kv_len, dtype=torch.int32, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    found = []
    for rows in q.split(1024):
        seen = F.pad(pattern.mask_mod(zero, zero, rows[:, None], kv).to(torch.int8), (1, 1))
        steps = seen.diff(dim=1)  # 1 where a run of keys begins, -1 behind it
        if int((steps > 0).sum(1).max()) > 1:
            raise NotServed("more than one interval of keys per query")
        found.append(torch.stack([(steps > 0).int().argmax(1), (steps < 0).int().argmax(1)]))
    begins, stops = torch.cat(found, dim=1).to(torch.int32)
    if not bool(begins.any()):
        return stops[None]
    return torch.stack([torch.zeros_like(begins), begins, stops])


def _packed(case: Case, pattern: Pattern, inputs: Inputs, call: Forward) -> Job:
    """Packed (total, H, D): every batch entry's documents, one after the other.

    `call` takes q, k, v, where the documents start (int32, the end included) and how long the longest one is.
    """
    starts = torch.tensor(pattern.document_starts)
    offsets = torch.cat([starts[:-1] + b * case.q_len for b in range(case.batch)] + [starts[-1:] * case.batch])
    offsets = offsets.to(device=inputs.q.device, dtype=torch.int32)
    forward = functools.partial(_with, call, offsets, int(starts.diff().max()))

    def pack(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).flatten(0, 1).contiguous()

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(0, (case.batch, case.q_len)).transpose(1, 2)

    return Job(forward, _leaves(case, pack(inputs.q), pack(inputs.k), pack(inputs.v)), pack(inputs.grad), unpack)


def _with(call: Callable[..., Any], starts: torch.Tensor, longest: int, *qkv: torch.Tensor) -> Any:
    return call(*qkv, starts, longest)


def _first(result: Any) -> torch.Tensor:
    """Some of these functions return (output, lse) whether asked or not."""
    return result[0] if isinstance(result, tuple) else result


@functools.cache
def cute_alibi(heads: int) -> Callable[..., Any]:
    """score - 2^(-8 (h + 1) / heads) · (q - kv), as flash-attn-4 wants its score mods."""
    from cutlass import Float32, cute

    @cute.jit
    def alibi(scores, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        exponent = (h + cute.full_like(h, 1)).to(Float32) * cute.full_like(scores, -8.0 / heads)
        return scores - cute.math.exp2(exponent) * (q_idx - kv_idx).to(Float32)

    return alibi


@functools.cache
def gemm(device: torch.device) -> Callable[[], Any]:
    """The yardstick that survives a change of machine: a bf16 matrix product."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def available(device: torch.device, backend: str | None = None) -> list[Implementation]:
    """Ours first, then the peers that can run on this device."""
    found: list[Implementation] = [Composattn(backend), Composattn(backend, packed=True)]
    if device.type == "cuda":
        found += [
            Composattn(backend, deterministic=True),
            Composattn(backend, deterministic=True, packed=True),
            TorchSdpa("torch cuDNN", SDPBackend.CUDNN_ATTENTION),
            TorchSdpa("torch flash", SDPBackend.FLASH_ATTENTION),
            FlexAttention(),
        ]
        if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
            found.append(FlashAttention4())
        if flash_attention_3.is_there():
            found.append(FlashAttention3())
        if importlib.util.find_spec("cudnn"):
            found.append(CudnnFlex())
    else:
        found += [TorchSdpa("torch sdpa", None), FlexAttention()]
    return found
