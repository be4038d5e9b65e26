"""The package's front door: attention(), and Attention (plan once, call many)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch._C import _are_functorch_transforms_active
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .backends import multiplies_eight_bits
from .call.checks import check_flag, refuse_arguments
from .call.eight_bits import Quantized
from .call.inputs import OUT_ALONE, Asked, InputOptions, Inputs
from .call.quantized import in_eight_bits
from .call.schedule import Schedule
from .call.sequences import Paged, Varlen
from .dispatch import operators
from .dispatch.pinned import Pinned
from .dispatch.plan_cache import planned_for
from .dispatch.planned import CallOptions, asked_for
from .dispatch.serialized import Serialized, serialize
from .errors import InvalidParallelOption, UnsupportedOption
from .graph.dynamo import dispatch_modes, function_modes
from .mods.dropout import Dropout, seed_number
from .mods.mask import Mask
from .mods.score import Score
from .mods.sink import Sink
from .parallel import Shard, active, context
from .parallel import operators as shared_operators
from .parallel.shard import refuse_eight_bits

if TYPE_CHECKING:
    from typing_extensions import Unpack

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]

_Off = Literal[False]
Tensor = torch.Tensor
Given = Tensor | Quantized


class Attention(Pinned):
    """Attention with given mods, planned once and called many times.

        attn = Attention(score_mod=alibi(slopes) >> softcap(30.0), mask_mod=causal() & document(ids))
        out = attn(q, k, v)
        out, lse = attn(q, k, v, return_lse=True)

    score_mod: `(score, b, h, q_idx, kv_idx) -> score`, a plain function or a `Score`; None changes nothing.
    mask_mod: `(b, h, q_idx, kv_idx) -> bool`, a plain function or a `Mask`, True where q may attend to kv.
    sinks: (Hq,) floats, a logit per query head beside those of the keys, with no value: exp(sinks[h]) is in the sum of
        exponentials of each row, and so in lse. Differentiable. None: there is none.
    scale: factor of q·k before the score mod; None is 1/sqrt(D).
    backend: "reference", "streaming", "hopper", ...; None picks by device (see `ca.backends.choose`).
    dropout_p: the probability with which a weight behind the softmax is 0, in steps of 2^-16; others are multiplied by
        1 / (1 - dropout_p). lse knows nothing of it. The same weights are dropped in the backward and on every backend.
    dropout_seed: which weights, with b, h, q_idx and kv_idx: an int, or a 0-d int64 tensor on q's device, which is read
        at each call. None: torch's generator gives one per call (that of the CPU, that of q's device in compiled code),
        so that `torch.manual_seed` and checkpointing repeat it. A CUDA graph replays the seed: give a tensor.
    deterministic: whether the fused backward sums in a fixed order, so that gradients are bitwise the same in every
        run. None follows torch's setting at that time (`torch.use_deterministic_algorithms`).
    schedule: order and division of the work, see `Schedule`. None: the plan chooses.

    The mods are traced here, once. Python numbers and globals that they use become constants. Captured tensors are
    held by reference, and read at every call; so are `ca.scalar` values. Write to captured tensors with torch
    operations: the tiles that a mask leaves are found again after a write that torch counts. It does not count writes
    through `.data[...]` or numpy. Use `ca.nn.Attention` for parameters that others may replace (FSDP,
    `load_state_dict(assign=True)`, `functional_call`, meta initialisation): it reads them by name at each call. So does
    `ca.attention`.

    Raises: `WrongSignature`, `WrongReturn`, `WrongComposition`, the `TraceError`s, `NotATensor`, `WrongRank` and
    `UnsupportedDType` (of sinks), `UnsupportedOption` (of dropout), `InvalidScale`, `UnknownBackend`,
    `InvalidSchedule`.
    """

    def __init__(
        self,
        *surplus: Any,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        sinks: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
        scale: float | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        schedule: Schedule | None = None,
        **unknown: Any,
    ) -> None:
        refuse_arguments(surplus, unknown)
        score = None if score_mod is None else Score.of(score_mod)
        mask = None if mask_mod is None else Mask.of(mask_mod)
        sink = None if sinks is None else Sink.of(sinks)
        keep = Dropout.with_seed(dropout_p, dropout_seed)
        super().__init__((score, mask, sink, keep, None), (scale, backend, deterministic, schedule))

    @overload  # type: ignore[override]
    def __call__(
        self, q: Given, k: Given, v: Given, *, return_lse: _Off = ..., return_max_scores: _Off = ...,
        context_parallel: Shard | None = ..., **options: Unpack[InputOptions],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def __call__(
        self, q: Given, k: Given, v: Given, *, return_lse: bool = ..., return_max_scores: bool = ...,
        context_parallel: Shard | None = ..., **options: Unpack[InputOptions],
    ) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip

    def __call__(
        self,
        q: Given,
        k: Given,
        v: Given,
        *surplus: Any,
        return_lse: bool = False,
        return_max_scores: bool = False,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
        context_parallel: Shard | None = None,
        q_scale: Tensor | float | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        out_dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """out (B, Hq, Sq, Dv) in q's dtype; with `return_lse` also lse (B, Hq, Sq), natural logarithm, fp32.

        With `return_max_scores`, the last result is the largest score of each row, after score mod and mask:
        (B, Hq, Sq), fp32, -inf where a row sees nothing. No gradient flows through it.

        q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv); Hq a multiple of Hkv. With `varlen` packed
        (total, H, D) tensors and lse (Hq, total_q); with `paged` k and v in pages. A row with nothing to attend gives
        out 0, lse -inf (with sinks: its head's) and zero gradients to q, k and v. Differentiable in q, k, v, sinks and
        captured tensors, through out and lse, but not with `paged`.

        context_parallel: q, k and v are this rank's rows of a sequence that it shares, see `ca.ContextParallel`; inside
            of `with cp:` the shard planned last is meant.
        q_scale, k_scale, v_scale, out_dtype: of tensors of 8 bits, see `ca.attention`.

        Raises: the `InvalidArgument`s, `CapturedIndexOutOfRange`, `CapturedTensorChanged`, `BackendUnavailable`,
        `GradientUnsupported`.
        """
        if len(surplus) + len(unknown):
            refuse_arguments(surplus, unknown)
        asked = OUT_ALONE
        if return_lse is not False or return_max_scores is not False:
            asked = asked_for(return_lse, return_max_scores)
        keep = self._state[0][3]
        scaled = q_scale is not None or k_scale is not None or v_scale is not None or out_dtype is not None
        if scaled or isinstance(q, Quantized) or isinstance(k, Quantized) or isinstance(v, Quantized):
            (score, mask, sink, *_), options = self._state
            given = score, mask, None if sink is None else sink.leaves[0], keep
            scales = q_scale, k_scale, v_scale, out_dtype
            return _quantised((q, k, v), scales, given, options, asked, (varlen, paged), context_parallel)
        compiling = torch.compiler.is_compiling()
        shard = context_parallel
        if shard is None and (context.entered or context.left):
            shard = active(q, compiling)
        # the modes first: without one nothing is written down, and asking takes no function of ours
        recorded = not compiling and (function_modes() or dispatch_modes()) and operators.written_down()
        eager = not compiling and shard is None and q.__class__ is not FakeTensor and not recorded
        alone = eager and asked is OUT_ALONE and varlen is None and paged is None and keep is None
        if alone and not _are_functorch_transforms_active() and forward_ad._current_level < 0:
            if self._seen:
                self._watch()
            fast_path = self.fast_path_of(q, k, v)
            out = None if fast_path is None else fast_path(q, k, v, None)
            if out is not None:
                return out
        inputs = Inputs(q, k, v, varlen, paged)
        if shard is not None:
            _check_shared(shard, keep)
            if compiling:
                return shared_operators.call(shard.number, inputs, self.serialized, asked)
            mods, options = self._state
            return shard.attend(mods[:3], options, inputs, asked)
        if not eager:
            call = self.serialized if keep is None else self._serialized_with(keep.on_device(q.device))
            return operators.call(inputs, call, self.number, asked)  # type: ignore[no-any-return]
        if keep is not None:
            keep.draw()
        return super().__call__(inputs, asked)  # type: ignore[no-any-return]

    def _serialized_with(self, keep: Dropout) -> Serialized:
        """What compiled code calls, with a seed of its own."""
        (score, mask, sink, *_), options = self._state
        return serialize((score, mask, sink, keep, None), options)

    def explain(
        self,
        q: Given,
        k: Given,
        v: Given,
        *,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
        emulate: bool = False,
    ) -> Any:
        """What a call with these inputs computes and how: formulas, dependence classes, plan, tiles, FLOPs.

        Returns an object that prints as text. `emulate` adds instruction counts of the emulated kernel to dense calls.
        The lengths of `varlen` and `paged` are read, which waits for the device. Scales of 8 bits: as `ca.Quantized`.
        """
        from .explain import explain

        check_flag("emulate", emulate)
        if not (isinstance(q, Quantized) or isinstance(k, Quantized) or isinstance(v, Quantized)):
            return explain(self, Inputs(q, k, v, varlen, paged), emulate=emulate)
        (score, mask, sink, keep, _), options = self._state
        where, multiplies = (varlen, paged), multiplies_eight_bits(options[1])
        call = in_eight_bits((q, k, v), (None,) * 3, None, where, score, options[0], sink is not None, multiplies)
        options = options if call.out_dtype is None else (*options, call.out_dtype)
        score = None if call.score_mod is None else Score.of(call.score_mod)
        attn = Pinned((score, mask, sink, keep, call.values), options)
        return explain(attn, Inputs(call.q, call.k, call.v, varlen, paged), emulate=emulate)

    def __repr__(self) -> str:
        score, mask = self.names
        return f"Attention(score_mod={score}, mask_mod={mask})"


_seed_of_a_call = seed_number()


@overload
def attention(
    q: Given, k: Given, v: Given, *, return_lse: _Off = ..., return_max_scores: _Off = ...,
    context_parallel: Shard | None = ..., **options: Unpack[CallOptions],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Given, k: Given, v: Given, *, return_lse: bool = ..., return_max_scores: bool = ...,
    context_parallel: Shard | None = ..., **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def attention(
    q: Given,
    k: Given,
    v: Given,
    *surplus: Any,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    backend: str | None = None,
    deterministic: bool | None = None,
    varlen: Varlen | None = None,
    paged: Paged | None = None,
    schedule: Schedule | None = None,
    context_parallel: Shard | None = None,
    q_scale: Tensor | float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(mask(score_mod(scale * q·kᵀ)))·v, exact, fused, differentiable.

        out = ca.attention(q, k, v, mask_mod=causal() & sliding_window(1024), score_mod=softcap(30.0))

    score_mod: `(score, b, h, q_idx, kv_idx) -> score`. mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True where q may
    attend to kv. `Attention` says more of them, of all other options, and of errors. The mods are looked at in every
    call, so what a plain function closes over may change between calls. If nothing changed, nothing is traced or
    planned again. Plans are kept as long as the captured tensors live.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) → out (B, Hq, Sq, Dv), lse (B, Hq, Sq) fp32.
    `return_lse` and `return_max_scores` ask for more than out, see `Attention.__call__`.
    Packed, with `varlen`: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) → out (total_q, Hq, Dv), lse
    (Hq, total_q), see `Varlen`. Keys and values in pages, with `paged`: see `Paged`. Rows of a sequence that several
    ranks share, with `context_parallel`: see `ca.ContextParallel`.

    k and v may have 8 bits (float8_e4m3fn, float8_e5m2), and q too, times `k_scale`, `v_scale` and `q_scale`; out is
    of q's dtype, or of `out_dtype` where q has 8 bits (None: bf16). Score mods see true scores. A scale is a number,
    (1,), (Hkv,), (B, Hkv) (of q also by its own heads), or has one number for each row, (B, H, S), (total, H) or
    (num_pages, H, page_size), or for each block of rows, (B, H, S / block), block a power of two, of v (B, H,
    S / block, 1); v's also for each channel, (B, Hkv, Dv). See `ca.Quantized`, which is a tensor with its scale, and
    `ca.quantize`.

    Source: Dao et al. 2022, FlashAttention, section 3.1; of the mods' signatures, Dong et al. 2024, Flex Attention.
    """
    if len(surplus) + len(unknown):
        refuse_arguments(surplus, unknown)
    options = (scale, backend, deterministic, schedule)
    asked = OUT_ALONE
    if return_lse is not False or return_max_scores is not False:
        asked = asked_for(return_lse, return_max_scores)
    keep = Dropout.with_seed(dropout_p, dropout_seed, _seed_of_a_call)
    scaled = q_scale is not None or k_scale is not None or v_scale is not None or out_dtype is not None
    if scaled or isinstance(q, Quantized) or isinstance(k, Quantized) or isinstance(v, Quantized):
        scales, given = (q_scale, k_scale, v_scale, out_dtype), (score_mod, mask_mod, sinks, keep)
        return _quantised((q, k, v), scales, given, options, asked, (varlen, paged), context_parallel)
    compiling = torch.compiler.is_compiling()
    shard = context_parallel
    if shard is None and (context.entered or context.left):
        shard = active(q, compiling)
    recorded = not compiling and (function_modes() or dispatch_modes()) and operators.written_down()
    if compiling or shard is not None or q.__class__ is FakeTensor or recorded:
        inputs = Inputs(q, k, v, varlen, paged)
        return _serialized_or_shared(inputs, (score_mod, mask_mod, sinks, keep, None), options, asked, shard, compiling)
    if keep is not None:
        keep.draw()
    planned, borrowed = planned_for(score_mod, mask_mod, sinks, keep, options)
    if asked is OUT_ALONE and varlen is None and paged is None:
        fast_path = planned.fast_path_of(q, k, v)
        out = None if fast_path is None else fast_path(q, k, v, borrowed)
        if out is not None:
            return out
    return planned(Inputs(q, k, v, varlen, paged), asked, borrowed)  # type: ignore[no-any-return]


def _serialized_or_shared(
    inputs: Inputs, given: tuple[Any, ...], options: tuple[Any, ...], asked: Asked, shard: Shard | None, compiling: bool
) -> Any:
    """A call that an operator stands for, as torch compiles it or only asks for shapes; or one that ranks share."""
    score_mod, mask_mod, sinks, keep, values = given
    score = None if score_mod is None else Score.of(score_mod)
    mask = None if mask_mod is None else Mask.of(mask_mod)
    sink = None if sinks is None else Sink.of(sinks)
    if shard is None:
        keep = None if keep is None else keep.on_device(inputs.q.device)
        return operators.call(inputs, serialize((score, mask, sink, keep, values), options), -1, asked)
    _check_shared(shard, keep)
    if compiling:
        return shared_operators.call(shard.number, inputs, serialize((score, mask, sink, None, None), options), asked)
    return shard.attend((score, mask, sink), options, inputs, asked)


def _quantised(
    tensors: tuple[Any, Any, Any],
    scales: tuple[Any, ...],
    mods: tuple[Any, ...],
    options: tuple[Any, ...],
    asked: Asked,
    where: tuple[Varlen | None, Paged | None],
    shard: Shard | None,
) -> Any:
    """A call with tensors of 8 bits; `scales`: those of q, k and v, and out's dtype."""
    if shard is not None or context.entered:
        refuse_eight_bits()
    score_mod, mask_mod, sinks, keep = mods
    q_scale, k_scale, v_scale, out_dtype = scales
    seen = sinks is not None or asked != OUT_ALONE
    # transforms of torch.func compute in PyTorch
    multiplies = None if _are_functorch_transforms_active() else multiplies_eight_bits(options[1])
    scaled = q_scale, k_scale, v_scale
    call = in_eight_bits(tensors, scaled, out_dtype, where, score_mod, options[0], seen, multiplies)
    options = options if call.out_dtype is None else (*options, call.out_dtype)
    inputs = Inputs(call.q, call.k, call.v, *where)
    compiling = torch.compiler.is_compiling()
    recorded = not compiling and (function_modes() or dispatch_modes()) and operators.written_down()
    if compiling or call.q.__class__ is FakeTensor or recorded:
        given = call.score_mod, mask_mod, sinks, keep, call.values
        return _serialized_or_shared(inputs, given, options, asked, None, compiling)
    if keep is not None:
        keep.draw()
    planned, borrowed = planned_for(call.score_mod, mask_mod, sinks, keep, options, values=call.values)
    return planned(inputs, asked, borrowed)


def _check_shared(shard: Shard, keep: Dropout | None) -> None:
    """Raises `InvalidParallelOption`; `UnsupportedOption` of dropout: ranks count rows of their own."""
    if keep is not None:
        raise UnsupportedOption("dropout_p is not taken where ranks share a sequence; leave it out, or set it to 0.0")
    if not isinstance(shard, Shard):
        raise InvalidParallelOption(
            f"context_parallel is a {type(shard).__name__}; pass what ca.ContextParallel(mesh).plan(...) gives"
        )
