"""How close is close enough: the error of a result, held to that of plain PyTorch at the same precision.

Let `exact` be the oracle (`backends.reference` in fp64) and `plain` the same call written with torch's own matrix
products and softmax in the dtype of q, differentiated by torch's autograd. A result of attention is right when

    |result - exact|  <=  2 * |plain - exact|  +  u * |exact|          u: half the spacing of the result's dtype at 1

in the largest error of each tensor and in its root mean square, for out, lse, dq, dk, dv and every captured gradient;
rows that see nothing must be exactly 0, -inf and 0. For fp64 tensors the oracle errs as much as plain does, and in long
sums (a captured table of few numbers) in other ways: there 2 is 8, and u the spacing itself. What cancels inside a
score mod, as in a derivative near 0, it rounds as plain does: there four runs in fp32 say what is lost, at 2^-29 of it.

One plain run can be right by luck (a softmax over one key has no error at all, the error of a single number may be
any) or just miss the kink of a score mod. So `plain` stands for nine runs, and the worst counts: as it is, and with
what a fused kernel has to round as well disturbed by that rounding, each element up or down at random (four draws,
each in both directions). Disturbed by 4 units of the working precision are the score before and after its mod (of
Σ|q||k| and of |score|), P recomputed in the backward (of 1 + |score|; along a row by 1 unit of the largest, the
rounding of LSE), dP (of Σ|dO||v|) and the gradient of the modified score; by one rounding to the dtype of q the
factors P and dS of the products, and rowsum(dO·O) by that of every O.

Where k and v have 8 bits, `exact` and `plain` are of what they stand for with their scales; where q has too, the P of
`plain` is rounded to e4m3, with the largest of each row at 2^8, as a product of 8-bit numbers has it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..analysis.program import Program
from ..backends import reference
from ..backends.layouts import arrange
from ..call.eight_bits import EIGHT_BITS, narrowed
from ..call.problem import Problem, softmax_scale
from ..call.quantized import in_eight_bits
from ..call.scales import Values
from ..call.sequences import Paged, Sequences, Varlen
from ..mods.dropout import Dropout
from ..mods.mask import ALL, Mask
from ..mods.score import IDENTITY, Score
from ..mods.sink import Sink
from .memory import poisoned

Pair = tuple[float, ...]  # of a result: the largest error, and the root of the mean square

Results = dict[str, torch.Tensor]
Attention = Callable[..., Any]

FACTOR = 2.0
"""How much worse than plain PyTorch an error may be."""

NEAR = 2.0**-6
"""How far from q, of each number, fp32 runs say what a score mod loses."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One call of attention with its gradients of the outputs; prints as a sentence.

    `dout` or `dlse` None: nothing flows back through that output; both None: forward only.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    scale: float | None = None
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    name: str = ""
    varlen: Varlen | None = None
    paged: Paged | None = None
    sinks: torch.Tensor | None = None
    dropout: tuple[float, int] = (0.0, 0)  # the probability, and a seed
    scales: tuple[Any, Any, Any] = (None, None, None)  # of q, k and v of 8 bits
    out_dtype: torch.dtype | None = None  # where q has 8 bits
    values: Values | None = None  # what `scales` say of v, see `wide`
    narrow: bool = False  # whether P is rounded to 8 bits, see `wide`

    @property
    def wide(self) -> Case:
        """The case with the scales of 8-bit tensors as mods, and q widened; itself where none has 8 bits."""
        if self.k.dtype not in EIGHT_BITS:
            return self
        tensors, where = (self.q, self.k, self.v), (self.varlen, self.paged)
        call = in_eight_bits(tensors, self.scales, self.out_dtype, where, self.score_mod, self.scale, True)
        read = {"score_mod": call.score_mod, "values": call.values, "scales": (None, None, None), "out_dtype": None}
        return dataclasses.replace(self, q=call.q, narrow=self.q.dtype in EIGHT_BITS, **read)

    @property
    def sequences(self) -> Sequences:
        return Sequences.of(self.varlen, self.paged)

    @property
    def program(self) -> Program:
        score = IDENTITY if self.score_mod is None else Score.of(self.score_mod)
        mask = ALL if self.mask_mod is None else Mask.of(self.mask_mod)
        keep = Dropout.with_seed(*self.dropout)
        sink = None if self.sinks is None else Sink.of(self.sinks)
        others = (sink, keep, self.values)
        return Program(score.expr, mask.expr, *(None if mod is None else mod.expr for mod in others))

    @property
    def learned(self) -> list[torch.Tensor]:
        """Captured tensors that ask for a gradient."""
        return [c.tensor for c in self.program.captures if c.tensor.requires_grad]

    def without_gradients(self) -> Case:
        """This case, forward only."""
        return dataclasses.replace(self, dout=None, dlse=None)

    def __repr__(self) -> str:
        return f"Case({self.name or describe(self)})"


def describe(case: Case) -> str:
    """Shapes and dtype of a case, short: B2 H4/2 S17x33 D16/8 bfloat16."""
    given, case = case, case.wide
    p = Problem.of(case.q, case.k, case.v, case.varlen, case.paged)
    lengths = f"S{p.q_len}" if p.q_len == p.kv_len else f"S{p.q_len}x{p.kv_len}"
    dims = f"D{p.head_dim}" if p.head_dim == p.head_dim_v else f"D{p.head_dim}/{p.head_dim_v}"
    group = f"H{p.q_heads}" if p.q_heads == p.kv_heads else f"H{p.q_heads}/{p.kv_heads}"
    types = " ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (given.q, given.k, given.v)))
    return f"B{p.batch} {group} {lengths} {dims} {types}{_where_rows_lie(case)}"


def _where_rows_lie(case: Case) -> str:
    """The tensors of a packed or paged case, by name."""
    page = "" if case.paged is None else f" pages of {case.paged.page_size}"
    named = [f" {name} {t.tolist()}" for name, t in zip(Sequences._fields, case.sequences, strict=True)
             if t is not None and t.ndim == 1]  # fmt: skip
    return page + "".join(named)


def check(attention: Attention, case: Case, *, factor: float = FACTOR) -> None:
    """Runs `attention` on `case`, forward and backward, in poisoned memory, and holds it to the tolerance.

    `attention` is called as `composattn.attention` is; `functools.partial(composattn.attention, backend="hopper")`
    checks a backend. Raises AssertionError with every error and what it may be.
    """
    assert_attention_close(run(attention, case), case, factor)


def run(attention: Attention, case: Case) -> Results:
    """{"out", "lse", and where gradients flow "dq", "dk", "dv", "d captured 0", ...} of `attention` on `case`."""
    q, k, v = (x.detach().requires_grad_(x.dtype not in EIGHT_BITS) for x in (case.q, case.k, case.v))
    mods: dict[str, Any] = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "scale": case.scale}
    if case.varlen is not None:
        mods["varlen"] = case.varlen
    if case.paged is not None:
        mods["paged"] = case.paged
    if case.sinks is not None:
        mods["sinks"] = case.sinks
    if case.dropout[0]:
        mods["dropout_p"], mods["dropout_seed"] = case.dropout
    mods |= {name: s for name, s in zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True) if s is not None}
    if case.out_dtype is not None:
        mods["out_dtype"] = case.out_dtype
    with poisoned(case.q.device):
        if case.dout is None and case.dlse is None:
            with torch.no_grad():
                out, lse = attention(q, k, v, **mods, return_lse=True)
            return {"out": out, "lse": lse}
        out, lse = attention(q, k, v, **mods, return_lse=True)
        return _with_gradients(out, lse, q, k, v, case.learned, case)


def _is_within(errors: Pair, allowed: Pair) -> bool:
    return all(e <= a for e, a in zip(errors, allowed, strict=True))


def _allowed(
    errors: Mapping[str, Pair],
    dtypes: Mapping[str, torch.dtype],
    case: Case,
    exact: dict[str, torch.Tensor],
    factor: float,
) -> dict[str, Pair]:
    """The most that each result may err, by as many runs of plain PyTorch as it takes to allow `errors`."""
    allowed: dict[str, Pair] = {}
    roundings = 1.0
    if case.q.dtype == torch.float64:
        # the oracle itself then errs as much, sums in its own order and rounds; of 26,500 random calls one reached 5.3
        factor, roundings = 4 * factor, 2.0
    for plain, of, share in _plain_runs(case, exact):
        for key in errors:
            unit = roundings * torch.finfo(dtypes[key]).eps / 2
            rounding = tuple(unit * size for size in _sizes(_finite(exact[key])))
            # fp32 may overflow where fp64 does not, which tells nothing
            known = (share * e if share == 1.0 or math.isfinite(e) else 0.0 for e in _errors(plain[key], of[key]))
            now = tuple(factor * e + r for e, r in zip(known, rounding, strict=True))
            allowed[key] = tuple(map(max, now, allowed.get(key, now)))
        if all(_is_within(errors[key], allowed[key]) for key in errors):
            break  # most often after the first run
    return allowed


def assert_attention_close(actual: Mapping[str, torch.Tensor], case: Case, factor: float = FACTOR) -> None:
    """Holds the results of an attention call to the tolerance of this page.

    actual: what was computed, by name, all or some of "out" (B, Hq, Sq, Dv), "lse" (B, Hq, Sq), "dq", "dk", "dv", and
    "d captured 0", ... for the captured tensors that require grad, in the order in which the score mod and the mask
    read them first, sinks last; packed as the case is.

    Raises: AssertionError, with a table of errors and what they may be; KeyError for a name that is no result.
    """
    case = case.wide
    exact = _reference(case, torch.float64)
    for key in actual:
        if key not in exact:
            raise KeyError(f"{key!r} is not a result of this call; there are {', '.join(exact)}")
    problems = [*_wrong_forms(actual, exact), *_wrong_rows(actual, exact, case)]
    errors = {key: _errors(actual[key], exact[key]) for key in actual} if not problems else {}
    allowed = _allowed(errors, {key: actual[key].dtype for key in errors}, case, exact, factor)
    problems += [f"{key} is off" for key, found in errors.items() if not _is_within(found, allowed[key])]
    if problems:
        rows = [
            f"  {key:14} max {e[0]:.2e} of {allowed[key][0]:.2e} allowed, rms {e[1]:.2e} of {allowed[key][1]:.2e}"
            for key, e in errors.items()
        ]
        raise AssertionError("\n".join([f"{case.name or describe(case)}: {'; '.join(problems)}", *rows]))


def _wrong_forms(actual: Mapping[str, torch.Tensor], exact: Results) -> list[str]:
    wrong = []
    for key, value in actual.items():
        if value.shape != exact[key].shape:
            wrong.append(f"{key} has shape {tuple(value.shape)}, not {tuple(exact[key].shape)}")
        elif bool(value.isnan().any()) and not bool(exact[key].isnan().any()):
            wrong.append(f"{key} has {int(value.isnan().sum())} NaN of {value.numel()}")
    return wrong


def _wrong_rows(actual: Mapping[str, torch.Tensor], exact: Results, case: Case) -> list[str]:
    """Rows that see nothing are exact, and so are keys of no sequence."""
    wrong = []
    empty = exact["lse"] == -math.inf
    empty_rows = empty if case.q.ndim == 4 else empty.mT  # lse (H, total), out (total, H, Dv)
    unused = _unused_keys(case)
    for key, value in actual.items():
        if value.shape != exact[key].shape:
            continue
        if key == "lse" and not torch.equal(value == -math.inf, empty):
            wrong.append(f"lse is -inf in {int((value == -math.inf).sum())} rows, should be in {int(empty.sum())}")
        if key in ("out", "dq") and bool((value[empty_rows] != 0).any()):
            wrong.append(f"{key} is not 0 in rows that see nothing")
        if key in ("dk", "dv") and unused is not None and bool((value[unused] != 0).any()):
            wrong.append(f"{key} is not 0 in rows of no sequence")
    return wrong


def _unused_keys(case: Case) -> torch.Tensor | None:
    """(total_k,): which packed keys are of no sequence."""
    if case.varlen is None or case.paged is not None:
        return None
    unused = torch.ones(case.k.shape[0], dtype=torch.bool, device=case.k.device)
    for part in arrange(case.sequences, case.q, case.k).parts:
        unused[part.keys] = False
    return unused


def _errors(value: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) error; infinities that agree are no error."""
    difference = torch.where(value.double() == exact, 0.0, value.double() - exact).abs()
    return _sizes(difference)


def _sizes(x: torch.Tensor) -> tuple[float, float]:
    if x.numel() == 0:
        return 0.0, 0.0
    return float(x.abs().max()), float(x.square().mean().sqrt())


# --- the runs that a result is compared with -----------------------------------------------------------------


def _plain_runs(case: Case, exact: Results) -> Iterator[tuple[Results, Results, float]]:
    """Results of plain PyTorch, what they should be, and what share of their errors is that of the dtype of q."""
    for run in range(9):
        disturbed = _Disturbed(case, (run - 1) // 2, (-1.0) ** run) if run else _NarrowP() if case.narrow else None
        yield _reference(case, case.q.dtype, disturbed), exact, 1.0
    if case.q.dtype == torch.float64:
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            # not of this q, as one run can be right by luck
            near = dataclasses.replace(case, q=case.q * (1 + NEAR * _signs(case.q, generator)))
            share = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            yield _reference(near, torch.float32), _reference(near, torch.float64), share


def _reference(case: Case, precision: torch.dtype, rounding: reference.Rounding | None = None) -> Results:
    """The results of the reference in `precision`, kept as wide as they were computed only for fp64."""
    program = case.program
    wide = precision == torch.float64
    q, k, v = (x.detach().to(precision).requires_grad_() for x in (case.q, case.k, case.v))
    tensors = {id(t): (t.detach().double() if wide else t.detach().clone()).requires_grad_() for t in case.learned}
    scale = softmax_scale(case.scale, q.shape[-1])
    with torch.set_grad_enabled(case.dout is not None or case.dlse is not None):
        out, lse = reference.attention(
            q,
            k,
            v,
            score=program.score,
            mask=program.mask,
            sink=program.sink,
            keep=program.keep,
            values=program.values,
            scale=scale,
            precision=precision,
            tensors=tensors,
            rounding=rounding,
            sequences=case.sequences,
        )
    return _with_gradients(out, lse, q, k, v, list(tensors.values()), case)


def _with_gradients(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    learned: Sequence[torch.Tensor],
    case: Case,
) -> Results:
    results = {"out": out.detach(), "lse": lse.detach()}
    flows = [(o, g.to(o.dtype)) for o, g in ((out, case.dout), (lse, case.dlse)) if g is not None]
    if flows:
        inputs = [q, k, v, *learned]
        outputs, gradients = zip(*flows, strict=True)
        grads = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        names = ["dq", "dk", "dv", *(f"d captured {i}" for i in range(len(learned)))]
        for name, x, g in zip(names, inputs, grads, strict=True):
            results[name] = torch.zeros_like(x) if g is None else g.detach()
    return results


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """1 or -1 for each element, at random."""
    drawn = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8)
    return (2 * drawn - 1).to(like.device, like.dtype)


def _narrowed_p(weights: torch.Tensor) -> torch.Tensor:
    """`weights` as e4m3 holds them, where the largest of each row is 2^8."""
    unit = weights.amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny) / 256
    return narrowed(weights / unit, torch.float8_e4m3fn).to(weights.dtype) * unit


class _NarrowP:
    """P rounded to 8 bits, and nothing else: what is left of an exact attention to 8-bit tensors."""

    def score(self, score: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        return score

    def modified(self, score: torch.Tensor) -> torch.Tensor:
        return score

    def output(
        self, out: torch.Tensor, p: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, score: torch.Tensor
    ) -> torch.Tensor:
        if weights.shape[-1] == 0:
            return out
        lost = _narrowed_p(weights) - weights
        return (out.to(lost.dtype) + lost @ v.to(lost.dtype)).to(out.dtype)


class _Disturbed:
    """Roundings that every fused kernel has, each with a random sign, all of them turned around by `direction`."""

    def __init__(self, case: Case, draw: int, direction: float) -> None:
        working = torch.promote_types(case.q.dtype, torch.float32)
        self.unit = direction * 4 * torch.finfo(working).eps
        self.stored = direction * torch.finfo(case.q.dtype).eps / 2
        self.narrow = _NarrowP() if case.narrow else None
        self.generator = torch.Generator().manual_seed(draw)  # one draw's signs are the same in both directions

    def signs(self, like: torch.Tensor) -> torch.Tensor:
        return _signs(like, self.generator)

    def score(self, score: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        size = (q.detach().abs() @ k.detach().abs().mT).to(score.dtype) * abs(scale)
        moved = score + self.unit * size * self.signs(score)
        return _DisturbedGradient.apply(moved, 1 + (self.unit + self.stored) * self.signs(score))

    def modified(self, score: torch.Tensor) -> torch.Tensor:
        size = _finite(score.detach().abs())
        moved = score + self.unit * size * self.signs(score)
        # P = exp(score - lse) carries the rounding of lse, the same along a row
        of_lse = self.unit / 4 * size.amax(-1, keepdim=True) * self.signs(score[..., :1]) if score.shape[-1] else 0.0
        return _DisturbedGradient.apply(moved, 1 + of_lse + self.unit * self.signs(score))

    def output(
        self, out: torch.Tensor, p: torch.Tensor, weights: torch.Tensor, v: torch.Tensor, score: torch.Tensor
    ) -> torch.Tensor:
        of_p = (self.stored + self.unit * (1 + _finite(score.detach().abs()))) * self.signs(p)
        of_dp, of_delta = self.unit * self.signs(p), self.stored * self.signs(p[..., :1])
        out = out if self.narrow is None else self.narrow.output(out, p, weights, v, score)
        moved = out + ((weights * self.stored * self.signs(p)).to(v.dtype) @ v).detach()
        return _DisturbedOutput.apply(moved, p, weights, v, score, of_p, of_dp, of_delta)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isinf(), 0.0, x)


class _DisturbedGradient(torch.autograd.Function):
    """A score as it is, its gradient times `factor`."""

    @staticmethod
    def forward(ctx: Any, score: Any, factor: Any) -> Any:
        ctx.save_for_backward(factor)
        return score.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0], None


class _DisturbedOutput(torch.autograd.Function):
    """out as it is; v and the score receive what roundings of P, dP and rowsum(dO·O) in a backward make of them.

    `weights`: P behind dropout, whose gradient dP is; rowsum(dO·O) is of all of P, and of a sink's.
    """

    @staticmethod
    def forward(ctx: Any, out: Any, p: Any, weights: Any, v: Any, score: Any, *disturbed: Any) -> Any:
        ctx.save_for_backward(out, p, weights, v, *disturbed)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        out, p, weights, v, of_p, of_dp, of_delta = ctx.saved_tensors
        kind = v.dtype
        wide, out, v = dout.to(p.dtype), out.to(p.dtype), v.to(p.dtype)
        ds = weights * (wide @ v.mT) - p * (wide * out).sum(-1, keepdim=True)
        noise = of_p * ds + weights * of_dp * (wide.abs() @ v.abs().mT)
        noise = noise + p * of_delta * (wide * out).norm(dim=-1, keepdim=True)
        return dout, None, None, ((weights * of_p).mT @ wide).to(kind), noise, None, None, None
