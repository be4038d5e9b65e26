"""Gradients of a call by generated kernels: dQ, dK, dV and captured tensors.

dQ, dK and dV come from the fused backward, and so do gradients of captured tensors whose reads follow a pattern
(`composattn.analysis.captured_gradient`), which takes 8 bytes per element of the tensor. Those of what the score is
multiplied by follow from dQ (`composattn.analysis.score_factor`), of inputs in bf16. Those of other reads come from
the tile-by-tile backward of `composattn.backends.streaming` on the same GPU: O(S) memory, not fused, and of packed
sequences it reads the lengths on the host. Gradients of sinks come from the kernels around the main one
(`composattn.backends.fused.kernels.around.sink_sums`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from ....analysis.captured_gradient import GradientProgram, fused_reads
from ....analysis.derived import refresh
from ....analysis.program import Program
from ....analysis.score_factor import LEAST, ScoreFactor, score_factor
from ....call.autograd import BackwardInputs, Gradients, Grads
from ....call.problem import Problem
from ....call.sequences import Sequences
from ....errors import GradientUnsupported
from ....graph.evaluate import Env, evaluate, evaluate_all
from ....graph.expr import Capture, Dep
from ....graph.expr import captures as captures_of
from ....graph.gradient import partials
from ...gathered import total_for
from ...sinks import add_gradients, by_head
from ...streaming import DerivedMods, Streaming
from ..compiling.compile import compile_plan
from ..planning.plan_backward import SinkForm, backward_of
from ..rewrites import rewritten
from ..rewrites.posed import Posed
from ..tiles.target import Target
from .backward_kernels import SinkGradient
from .bulk import copyable
from .launch_backward import BackwardLauncher
from .sums import FixedPointSums

NOTHING: frozenset[Capture] = frozenset()


class FusedGradient:
    """The backward of one form of inputs; its kernels are made by `kernel_of` when first needed."""

    def __init__(
        self,
        problem: Problem,
        program: Program,
        scale: float,
        target: Target,
        kernel_of: Callable[[Any], Any] = compile_plan,
    ) -> None:
        self.kernel_of = kernel_of
        self.problem, self.scale, self.target = problem, scale, target
        self.rewriting = rewritten(Posed(problem, program, target, "backward"))
        self.program = program  # of the whole, which PyTorch's tiles are of
        self._launchers: dict[Any, BackwardLauncher] = {}
        self._summing: dict[frozenset[Capture], FixedPointSums] = {}
        self.fusable = fused_reads(self.rewriting.posed.program)
        # what multiplies the score, in the program as it is and as kernels have it
        self.factor, self.factor_in_kernels = [score_factor(p) for p in (program, self.rewriting.posed.program)]
        self.of_factor = self._learned_factor()
        self.in_kernels = frozenset((*self.fusable, *self.of_factor))
        self.by_head = None if program.sink is None else by_head(program.sink)
        self.of_sink = _read_by_sink(program, frozenset(self.fusable), packed=not problem.layout.is_dense)
        alone = self.by_head in self.of_sink and self.by_head not in self.fusable
        # which captured tensors want a gradient, where it is the sinks alone
        self._sinks_alone = tuple([c is self.by_head for c in program.captures]) if alone else ()

    def launcher(
        self, has_dlse: bool, deterministic: bool, summed: frozenset[Capture] = NOTHING, of_sinks: bool = False
    ) -> BackwardLauncher:
        """The compiled kernels, with or without a gradient through LSE and a fixed order of dQ's parts.

        `summed`: of which captured tensors the main kernel sums the gradient, or gives it by dQ. `of_sinks`: that of
        sinks is wanted too.
        """
        form = (has_dlse, deterministic, summed, of_sinks)
        found = self._launchers.get(form)
        if found is None:
            program = self._posed(summed)
            if not summed.isdisjoint(self.fusable):
                program = self.summing(summed).program
            by_head = self.by_head
            form_of_sinks = SinkForm(torch.float32 if by_head is None else by_head.tensor.dtype, by_head is None)
            sinks = form_of_sinks if of_sinks else None
            how: Any = {"has_dlse": has_dlse, "deterministic": deterministic, "sinks": sinks}
            plans = backward_of(dataclasses.replace(self.rewriting.posed, program=program), **how)
            found = self._launchers[form] = BackwardLauncher(plans, self.kernel_of, self.program)
        return found

    def _learned_factor(self) -> tuple[Capture, ...]:
        """Captured tensors that only the factor of the score reads, where rows of q say all that it changes with.

        Packed ones say the head alone.
        """
        factor, layout = self.factor, self.problem.layout
        if factor is None or self.factor_in_kernels is None or self.problem.dtype is not torch.bfloat16:
            return ()
        return factor.learned if layout.is_dense or not factor.value.deps & (Dep.B | Dep.Q) else ()

    def _posed(self, summed: frozenset[Capture]) -> Program:
        """What kernels compute that give gradients of these."""
        program = self.rewriting.posed.program
        if summed.isdisjoint(self.of_factor):
            return program
        assert self.factor_in_kernels is not None
        return self.factor_in_kernels.away_from_zero(program)

    def summing(self, summed: frozenset[Capture]) -> FixedPointSums:
        """Sums of these captured tensors."""
        found = self._summing.get(summed)
        if found is None:
            posed = self.rewriting.posed
            program = GradientProgram(self._posed(summed), {c: of for c, of in self.fusable.items() if c in summed})
            lengths = posed.problem.q_len, posed.problem.kv_len  # whose positions the factors are of
            found = FixedPointSums(program, self.program, self.problem, lengths, self.target, self.kernel_of)
            self._summing[summed] = found
        return found

    def describe(self) -> str:
        """Who sums the gradient of each captured tensor that the score mod is differentiable in, and in what memory."""
        lines = [f"{list(c.tensor.shape)}: by head, from LSE and D of the rows, repeatable" for c in self.of_sink]
        score = self.program.score
        for capture in dict.fromkeys(leaf.attr for leaf in (partials(score) if score else ()) if leaf.op == "read"):
            tensor, reads = capture.tensor, self.fusable.get(capture)
            who = "tile by tile in PyTorch, O(S) memory"
            if capture in self.of_factor:
                who = "from dQ of each row"
            elif reads:
                patterns = " and ".join(dict.fromkeys(r.pattern.value for r in reads))
                who = f"in the kernel, {patterns}, in 64-bit fixed point, {8 * tensor.numel()} bytes, repeatable"
            lines.append(f"{list(tensor.shape)}: {who}")
        return "\n".join(lines)

    def deterministic(self) -> bool:
        """Whether dQ has to be bitwise repeatable: as the problem says, or as torch is set now."""
        asked = self.problem.deterministic
        return torch._C._get_deterministic_algorithms() if asked is None else asked

    def launcher_before(self, of_captured: Sequence[bool]) -> BackwardLauncher | None:
        """The kernels of such a backward of out alone that sum nothing, if there was one."""
        if True in of_captured and of_captured != self._sinks_alone:
            return None
        return self._launchers.get((False, self.deterministic(), NOTHING, True in of_captured))

    def before(self, of_captured: Sequence[bool]) -> tuple[BackwardLauncher | None, FixedPointSums | None]:
        """The kernels of such a backward of out alone, and what they sum, if there was one that serves it all."""
        launcher = self.launcher_before(of_captured)
        wanted = frozenset(compress(self.program.captures, of_captured))
        if launcher is not None or not wanted.isdisjoint((*self.of_sink, *self.of_factor)):
            return launcher, None
        return self._launchers.get((False, self.deterministic(), wanted, False)), self._summing.get(wanted)

    def memory_of_sinks(self, captured: Sequence[torch.Tensor]) -> tuple[SinkGradient, Grads]:
        """The sinks and their gradient's memory, where they alone want one, and that among those of `captured`."""
        at = self._sinks_alone.index(True)
        sinks = captured[at]
        made = torch.empty_like(sinks)
        return (sinks, made), (*[None] * at, made, *[None] * (len(captured) - at - 1))

    def __call__(
        self,
        known: BackwardInputs,
        scalars: Sequence[float | int],
        sequences: Sequences,
        into: Gradients | None = None,
    ) -> Grads:
        """(dq, dk, dv, *d captured); captured tensors and `scalars` in the order of the program.

        `into`: memory for dq, dk and dv, where no captured tensor wants a gradient.
        """
        if torch.is_grad_enabled():
            raise GradientUnsupported(
                'the fused backward is not differentiable itself (create_graph=True); use backend="streaming", '
                "whose gradients are"
            )
        if True not in known.wanted[3:]:
            return *self._launched(known, scalars, sequences, into=into), *[None] * len(self.program.captures)
        return self._with_captured(known, scalars, sequences)

    def _with_captured(self, known: BackwardInputs, scalars: Sequence[float | int], sequences: Sequences) -> Grads:
        """All gradients, where captured tensors want one."""
        captures, wanted = self.program.captures, known.wanted
        asked = [c for c, want in zip(captures, wanted[3:], strict=True) if want]
        summed = self.in_kernels.intersection(asked)
        found: dict[Capture, torch.Tensor | None] = {}
        grads: Grads = (None, None, None)
        of_sink = self._of_sink(asked, known)
        sinks = self._values_of_sinks(known) if of_sink else None
        if not summed.isdisjoint(self.fusable):
            grads, found = self._summed(known, scalars, sequences, summed, sinks)
        elif summed or any(wanted[:3]) or sinks is not None:
            grads = self._launched(known, scalars, sequences, summed, of_sinks=sinks)
        if not summed.isdisjoint(self.of_factor):
            found |= self._of_factor(asked, known, grads[0])
        if sinks is not None:
            self._add_sinks(found, of_sink, sinks[1], known)
        if len(found) < len(asked):
            others = [c in asked and c not in found for c in captures]
            found |= self._streamed(known, others, scalars, sequences)
        return (*grads, *(found.get(c) for c in captures))

    def _of_factor(
        self, asked: Sequence[Capture], known: BackwardInputs, dq: torch.Tensor | None
    ) -> dict[Capture, torch.Tensor | None]:
        """Gradients of those `asked` for that multiply the score."""
        assert self.factor is not None and dq is not None
        given = dict(zip(self.program.captures, known.captured, strict=True))
        return gradients_of_factor(self.factor, [c for c in asked if c in self.of_factor], given, known.q, dq)

    def _of_sink(self, asked: Sequence[Capture], known: BackwardInputs) -> list[Capture]:
        """Whose gradient through the sink is wanted, which statistics of rows give; none where there is no pair."""
        return [c for c in asked if c in self.of_sink] if known.k.numel() and known.q.numel() else []

    def _launched(
        self,
        known: BackwardInputs,
        scalars: Sequence[float | int],
        sequences: Sequences,
        summed: frozenset[Capture] = NOTHING,
        made: Mapping[Capture, torch.Tensor] | None = None,
        of_sinks: SinkGradient | None = None,
        into: Gradients | None = None,
    ) -> Grads:
        """(dq, dk, dv); of `summed` the gradients are added up in tensors of `made`, that of sinks is filled in."""
        q, k, v, out, lse, dout, dlse, captured, *_ = known
        if dout.dtype is not out.dtype:
            dout = dout.to(out.dtype)
        form = (dlse is not None, self.deterministic(), summed, of_sinks is not None)
        launcher = self._launchers.get(form) or self.launcher(*form)
        given = (captured, scalars, sequences, made, of_sinks, None, into)
        return launcher(q, k, v, out, lse, dout, dlse, self.scale, *given)

    def _summed(
        self,
        known: BackwardInputs,
        scalars: Sequence[float | int],
        sequences: Sequences,
        summed: frozenset[Capture],
        of_sinks: SinkGradient | None,
    ) -> tuple[Grads, dict[Capture, torch.Tensor | None]]:
        """(dq, dk, dv), and the gradients of `summed`."""
        if known.q.is_cuda and known.q.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(known.q.device):
                return self._summed(known, scalars, sequences, summed, of_sinks)
        sums = self.summing(summed)
        known = known._replace(v=copyable(known.v), dout=copyable(known.dout.to(known.out.dtype)))
        begun = sums.begun(known.dout, known.v, known.dlse, known.captured, sequences)
        made = dict(zip(sums.program.made, begun, strict=True))
        grads = self._launched(known, scalars, sequences, summed, made, of_sinks)
        found = zip(self.program.captures, sums.gradients(begun, known.captured), strict=True)
        return grads, {c: t for c, t in found if t is not None}

    def _values_of_sinks(self, known: BackwardInputs) -> SinkGradient:
        """Sinks as kernels read them, and memory for their gradient: by head, or fp32 by sequence and head."""
        given = dict(zip(self.program.captures, known.captured, strict=True))
        if self.by_head is not None:
            sinks = given[self.by_head]
        else:
            assert self.program.sink is not None
            (value,) = evaluate_all([self.program.sink], self._at_sinks(known))
            sinks = value.float().expand(self.problem.batch, self.problem.q_heads).flatten()
        return sinks, torch.empty_like(sinks)

    def _at_sinks(self, known: BackwardInputs) -> Env:
        """(B, 1) sequences and (Hq,) heads."""
        device = known.q.device
        index = {
            "b": torch.arange(self.problem.batch, device=device)[:, None],
            "h": torch.arange(self.problem.q_heads, device=device),
        }
        at_call = zip(self.program.captures, known.captured, strict=True)
        return Env(index, float_dtype=torch.float32, device=device, tensors={id(c.tensor): t for c, t in at_call})

    def _add_sinks(
        self,
        found: dict[Capture, torch.Tensor | None],
        asked: Sequence[Capture],
        gradient: torch.Tensor,
        known: BackwardInputs,
    ) -> None:
        """Adds the gradients of what the sink reads to those of `found`."""
        given = dict(zip(self.program.captures, known.captured, strict=True))
        if self.by_head is not None:
            _add(found, self.by_head, gradient, given)
            return
        assert self.program.sink is not None
        totals = {id(c.tensor): total_for(given[c], torch.float32, gradient.device) for c in asked}
        by_sequence = gradient.view(self.problem.batch, self.problem.q_heads)
        add_gradients(self.program.sink, self._at_sinks(known), by_sequence, totals)
        for c in asked:
            _add(found, c, totals[id(c.tensor)], given)

    def _streamed(
        self, known: BackwardInputs, wanted: list[bool], scalars: Sequence[float | int], sequences: Sequences
    ) -> dict[Capture, torch.Tensor | None]:
        """The gradients of the `wanted` ones of the captured tensors, tile by tile in PyTorch."""
        known = known._replace(wanted=(False, False, False, *wanted))
        refresh(self.program.captures)
        streaming = Streaming(DerivedMods(self.program, self.scale), scalars, sequences)
        out = known.out
        if not known.partial:
            # finds the tiles to visit; its output, from fp32 products, also serves better than the rounded one
            out, *_ = streaming.forward(known.q, known.k, known.v, known.captured)
        grads = streaming.backward(known._replace(out=out, dout=known.dout.to(out.dtype)))
        return dict(compress(zip(self.program.captures, grads[3:], strict=True), wanted))


def _add(
    found: dict[Capture, torch.Tensor | None], capture: Capture, total: torch.Tensor, given: Mapping[Capture, Any]
) -> None:
    before = found.get(capture)
    found[capture] = (total if before is None else total + before).to(given[capture].dtype)


def _read_by_sink(program: Program, fusable: frozenset[Capture], packed: bool) -> tuple[Capture, ...]:
    """The captured tensors whose gradient through the sink statistics of rows give.

    Not where it differs by sequence (under vmap) and rows are packed: theirs don't say of which sequence they are.
    """
    sink, score = program.sink, program.score
    if sink is None or (packed and sink.deps & Dep.B):
        return ()
    others = captures_of(score) if score is not None else ()
    return tuple(c for c in captures_of(sink) if c in fusable or c not in others)


def gradients_of_factor(
    factor: ScoreFactor,
    asked: Sequence[Capture],
    given: Mapping[Capture, torch.Tensor],
    q: torch.Tensor,
    dq: torch.Tensor,
) -> dict[Capture, torch.Tensor | None]:
    """The gradients of captured tensors that only the `factor` of the score reads, `asked` of those `given`.

    q (B, H, S, D), or packed (total, H, D) where the factor is of a head alone; `dq` by kernels that are
    `ScoreFactor.away_from_zero`. Some operations on rows, for none of which the host waits.
    """
    if q.ndim == 4:
        products = q.float() * dq
    else:  # rows that no sequence has hold anything
        products = torch.where(dq == 0, 0.0, q.float() * dq).transpose(0, 1)[None]
    batch, heads, length, _ = products.shape
    b, h, row = (torch.arange(n, device=q.device) for n in (batch, heads, length))
    # (B, H, S, 1): nobody asks whether positions follow the distance
    index = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q": row.view(-1, 1)}
    tensors = {id(c.tensor): t for c, t in given.items()}
    env = Env(index, float_dtype=torch.float32, device=q.device, tensors=tensors)
    value = evaluate(factor.value, env)
    gradient = products.sum(-1, keepdim=True) / torch.where(value.abs() < LEAST, LEAST, value)
    totals = {id(c.tensor): total_for(given[c], torch.float32, q.device) for c in asked}
    add_gradients(factor.value, env, gradient, totals)
    return {c: totals[id(c.tensor)].to(given[c].dtype) for c in asked}
