"""The package's front door: attention(), Attention (plan once, call many); the whole story top to bottom.

A call flows: mods → program (graphs) → problem (checked facts of q, k, v) → backend → prepared call → (out, lse).
Everything but the last step is remembered by `Attention` for each form of inputs that it has met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import backends, errors, operators, transforms
from .block_sparse import Table
from .checks import check_blocks, check_contents
from .graph.mask import ALL, Mask
from .graph.program import Program
from .graph.score import IDENTITY, Score
from .graph.short_reads import refuse_short_reads
from .problem import Problem, refuse_foreign, softmax_scale
from .schedule import AUTO, Schedule
from .sequences import Paged, Sequences, Varlen, flatten

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]

_STATE = ("program", "names", "scale", "backend", "deterministic", "schedule")  # what copies and pickles keep
_FORMS_LIMIT = 4096  # forms of inputs that one Attention remembers, before it starts anew


class Attention:
    """Attention with given mods, planned once and called many times.

        attn = Attention(score_mod=alibi(slopes) >> softcap(30.0), mask_mod=causal() & document(ids))
        out = attn(q, k, v)
        out, lse = attn(q, k, v, return_lse=True)

    score_mod: `(score, b, h, q_idx, kv_idx) -> score`, a plain function or a `Score`; None changes nothing.
    mask_mod: `(b, h, q_idx, kv_idx) -> bool`, a plain function or a `Mask`, True where q may attend to kv.
    scale: factor of q·k before the score mod; None is 1/sqrt(D).
    backend: "reference", "streaming", "hopper", ...; None picks by device (see `ca.backends.choose`).
    deterministic: whether the fused backward sums in a fixed order, so that gradients are bitwise the same in every
        run; None is as torch is set when they are computed (`torch.use_deterministic_algorithms`).
    schedule: order and division of the work, see `Schedule`; None is all as the plan chooses.

    The mods are traced here, once: Python numbers and globals that they use are constants from now on, captured
    tensors are held by reference and read at every call, and `ca.scalar` values are read at every call. Write to
    captured tensors by torch operations: which tiles a mask leaves is derived anew where torch counts a write, which it
    does not through `.data` or numpy.

    Raises: `WrongSignature`, `WrongReturn`, `WrongComposition`, the `TraceError`s, `InvalidScale`, `UnknownBackend`,
    `InvalidSchedule`.
    """

    def __init__(
        self,
        *,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        scale: float | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        score = IDENTITY if score_mod is None else Score.of(score_mod)
        mask = ALL if mask_mod is None else Mask.of(mask_mod)
        softmax_scale(scale, 1)
        backends.check_name(backend)
        if deterministic is not None and not isinstance(deterministic, bool):
            raise errors.UnsupportedOption(
                f"deterministic is {deterministic!r}; it is True, False, or None (as torch is set)"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise errors.InvalidSchedule(f"schedule is a {type(schedule).__name__}; pass ca.Schedule(...)")
        self.program = Program(score.expr, mask.expr)
        self.names = (score.name, mask.name)
        self.scale, self.backend, self.deterministic = scale, backend, deterministic
        self.schedule = AUTO if schedule is None else schedule
        self._begin()

    def _begin(self) -> None:
        self._prepared: dict[Any, backends.Call] = {}  # by the form of the inputs
        self._planned: dict[Any, backends.Call] = {}  # by what plans are made of: fewer
        # what compiled code sees of this object, see `composattn.operators`
        self._number, self._inputs = operators.register(self), operators.inputs(self)
        captures, scalars = self.program.read_by_mods
        self._numbers = len(scalars)
        self._tables = [c for c in captures if isinstance(c, Table)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool = False,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """out (B, Hq, Sq, Dv) in q's dtype; with `return_lse` also lse (B, Hq, Sq), natural logarithm, fp32.

        q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv); Hq a multiple of Hkv. With `varlen` packed
        (total, H, D) tensors and lse (Hq, total_q); with `paged` k and v in pages. A row with nothing to attend gives
        out 0, lse -inf and zero gradients. Differentiable in q, k, v, captured tensors, through both; not `paged`.

        Raises: the `InvalidArgument`s, `CapturedIndexOutOfRange`, `BackendUnavailable`, `GradientUnsupported`.
        """
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        if torch.compiler.is_compiling() or q.__class__ is FakeTensor:
            return _as_operator(self, q, k, v, return_lse, varlen, paged)
        if paged is not None:
            refuse_gradient(q, k, v, *self._inputs)
        if transforms.active():
            both = transforms.attend(self, q, k, v, varlen, paged)
            return both if return_lse else both[0]
        call = self.prepared(q, k, v, varlen, paged)
        if varlen is not None or paged is not None:
            check_contents(q, k, varlen, paged)
        if self._tables:
            check_blocks(self._tables)
        out, lse = call(q, k, v, return_lse, Sequences.of(varlen, paged))
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def prepared(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
    ) -> backends.Call:
        """The prepared call for inputs of this form, remembered."""
        try:
            form = _form(q, k, v, varlen, paged)
        except (AttributeError, TypeError, RuntimeError):
            Problem.of(q, k, v, varlen, paged)  # not tensors, or not strided ones: says which
            raise
        call = self._prepared.get(form)
        if call is None:
            if len(self._prepared) >= _FORMS_LIMIT:
                self._prepared.clear()
                self._planned.clear()
            call = self._prepared[form] = self._prepare(self.problem(q, k, v, varlen, paged))
        return call

    def _prepare(self, problem: Problem) -> backends.Call:
        """Checks what the mods read, picks the backend and lets it plan, unless it did; what a repeated call skips."""
        if problem.device.type == "meta":
            raise errors.BackendUnavailable(
                "q lies on meta, which holds no numbers to compute with; for shapes alone call under "
                "torch._subclasses.fake_tensor.FakeTensorMode()"
            )
        check_captures(self.program, problem)
        planned = problem.rounded
        key = (planned, planned.layout.max_q_len, planned.layout.max_kv_len)
        call = self._planned.get(key)
        if call is None:
            call = self._planned[key] = self._plan(planned)
        return call

    def _plan(self, problem: Problem) -> backends.Call:
        backend = backends.choose(self.backend, problem)
        return backend.prepare(problem, self.program, softmax_scale(self.scale, problem.head_dim))

    def problem(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
    ) -> Problem:
        """The checked facts of a call with these inputs."""
        problem = Problem.of(q, k, v, varlen, paged)
        return dataclasses.replace(problem, deterministic=self.deterministic, schedule=self.schedule)

    def explain(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        varlen: Varlen | None = None,
        paged: Paged | None = None,
        emulate: bool = False,
    ) -> Any:
        """What a call with these inputs computes and how: formulas, dependence classes, plan, tiles, FLOPs.

        Returns an object that prints as text. `emulate` adds instruction counts of the emulated kernel, of dense calls.
        Lengths of `varlen` and `paged` are read, which waits for the device.
        """
        from .explain import explain

        return explain(self, q, k, v, varlen=varlen, paged=paged, emulate=emulate)

    def __repr__(self) -> str:
        score, mask = self.names
        return f"Attention(score_mod={score}, mask_mod={mask})"


def _form(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen | None, paged: Paged | None
) -> tuple[Any, ...]:
    """All that planning may look at; what `Attention` remembers a prepared call by."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.__class__, k.__class__, v.__class__,
        None if varlen is None else varlen.form, None if paged is None else paged.form,
    )  # fmt: skip


def _as_operator(
    plan: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    return_lse: bool,
    varlen: Varlen | None,
    paged: Paged | None,
) -> Any:
    """A call as torch.compile and fake tensors see it."""
    transforms.break_graph()
    if paged is not None:
        refuse_gradient(q, k, v, *plan._inputs)
    lengths, hints = flatten(varlen, paged)
    out, lse, _ = torch.ops.composattn.attend(
        q, k, v, plan._inputs, lengths, hints, plan._number, plan._numbers, return_lse
    )
    return (out, lse) if return_lse else out


def refuse_gradient(*tensors: torch.Tensor) -> None:
    """Raises `GradientUnsupported` where autograd would record a call whose keys lie in pages."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise errors.GradientUnsupported(
            "keys in pages are for inference, forward only; call under torch.no_grad() or torch.inference_mode(), "
            "or pack the keys and pass varlen=ca.Varlen(cu_seqlens_q, cu_seqlens_k)"
        )


def _autocast(*tensors: Any) -> Any:
    """Under autocast, q, k and v in its type, as `scaled_dot_product_attention` takes them."""
    kind = getattr(getattr(tensors[0], "device", None), "type", None)
    if kind is None or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    wide = torch.float64
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype is not wide else t for t in tensors])


def check_captures(program: Program, problem: Problem) -> None:
    """Captured tensors lie where q does, except 0-d ones, which travel as numbers.

    Raises: `BlockMaskMismatch`, `DeviceMismatch`, `UnsupportedCapture`, `CapturedIndexOutOfRange` for a tensor that is
    shorter than what is read of it.
    """
    for capture in program.captures:
        if isinstance(capture, Table):
            _check_blocks(capture, problem)
        tensor = capture.tensor
        refuse_foreign("a captured tensor", tensor)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise errors.UnsupportedCapture(f"a captured tensor is {tensor.layout}; capture a dense one: .to_dense()")
        if tensor.device != problem.device:
            raise errors.DeviceMismatch(
                f"a captured tensor of shape {tuple(tensor.shape)} lies on {tensor.device}, q on {problem.device}; "
                f'move it: tensor.to("{problem.device}")'
            )
        if tensor.ndim and tensor.numel() == 0:
            raise errors.UnsupportedCapture(f"a captured tensor of shape {tuple(tensor.shape)} has nothing to read")
    sizes = {"b": problem.batch, "h": problem.q_heads}
    if problem.layout.is_dense and problem.q_len and problem.kv_len:
        sizes |= {"q": problem.q_len, "kv": problem.kv_len}
    refuse_short_reads(program, sizes, problem.device)


def _check_blocks(table: Table, problem: Problem) -> None:
    """Raises `BlockMaskMismatch` for blocks of another call; of packed sequences the lengths may be anything."""
    layout = problem.layout
    q_len = problem.q_len if layout.q == "dense" else None
    kv_len = problem.kv_len if layout.kv == "dense" else None
    table.check(problem.batch, problem.q_heads, q_len, kv_len)


_plain: dict[Any, Attention] = {}
_PLAIN_LIMIT = 256


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool | None = None,
    varlen: Varlen | None = None,
    paged: Paged | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(mask(score_mod(scale * q·kᵀ)))·v, exact, fused, differentiable.

    Arguments and errors as of `Attention`, which is this function planned once. A plain function is traced at every
    call (tens of microseconds), so what it closes over may change between calls; ready mods and `Attention` are not.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) → out (B, Hq, Sq, Dv), lse (B, Hq, Sq) fp32.
    Packed, with `varlen`: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv) → out (total_q, Hq, Dv), lse
    (Hq, total_q), see `Varlen`. Keys and values in pages, with `paged`: see `Paged`.
    """
    options = (score_mod, mask_mod, scale, backend, deterministic, schedule)
    if torch.compiler.is_compiling():
        ready = isinstance(score_mod, Score | None) and isinstance(mask_mod, Mask | None)
        if not ready:
            plan = _plan_outside(*options)
            return plan(q, k, v, return_lse=return_lse, varlen=varlen, paged=paged)
        if torch._C._is_any_autocast_enabled():
            q, k, v = _autocast(q, k, v)
        plan = _plan_when_compiling(*options)
        return _as_operator(plan, q, k, v, return_lse, varlen, paged)
    plan = _plan(*options)
    return plan(q, k, v, return_lse=return_lse, varlen=varlen, paged=paged)


def _plan(
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float | None,
    backend: str | None,
    deterministic: bool | None,
    schedule: Schedule | None,
) -> Attention:
    score = IDENTITY if score_mod is None else Score.of(score_mod)
    mask = ALL if mask_mod is None else Mask.of(mask_mod)
    key = (score.expr, mask.expr, scale, backend, deterministic, schedule)
    try:
        planned = _plain.get(key)
    except TypeError:  # something can't be hashed, and so is no option: refused by name
        planned = None
    if planned is None:
        planned = Attention(
            score_mod=score,
            mask_mod=mask,
            scale=scale,
            backend=backend,
            deterministic=deterministic,
            schedule=schedule,
        )
        # a remembered plan would keep captured tensors alive, so only plans without any are remembered
        if not any(planned.program.read_by_mods):
            if len(_plain) >= _PLAIN_LIMIT:
                _plain.clear()
            _plain[key] = planned
    return planned


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _plan_when_compiling(*options: Any) -> Attention:
    """Mods that are values are the same as long as they are the same objects, which the compiled code checks."""
    return _plan(*options)


@torch._dynamo.disable(  # type: ignore[untyped-decorator]
    reason="a plain function as mask_mod or score_mod is traced by ca.attention at every call, which a compiled "
    "region can't do: make ca.Attention(...), or ca.Mask.of / ca.Score.of, outside of it and use that inside"
)
def _plan_outside(*options: Any) -> Attention:
    return _plan(*options)
