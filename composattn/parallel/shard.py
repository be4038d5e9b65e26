"""A sequence divided among ranks: which tokens are whose, and how each attention sees those of the others."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import errors
from ..call.eight_bits import EIGHT_BITS
from ..call.inputs import Asked, Inputs
from ..call.problem import Problem
from ..call.sequences import Varlen
from ..dispatch import transforms
from ..dispatch.pinned import Pinned
from ..dispatch.planned import asked_of
from ..dispatch.serialized import SharedMods as Mods
from ..graph import copies
from ..graph.dynamo import left_alone
from ..graph.scalar import Scalar
from ..mods.mask import Mask
from ..mods.mod import Mod
from .agreement import Said, agree, digest_of
from .attend import attend
from .describe import Described, describe
from .division import Division
from .exchange import Ranks
from .movement import Movement
from .moving_heads import ByHeads
from .moving_keys import ByKeys
from .offset_mods import Graphs, OffsetMods, Packed
from .strategy import Given, Strategy
from .traffic import TensorSizes, Traffic, choose_traffic
from .visits import visits_of

Method = Literal["auto", "exchange", "gather", "heads"]
CapturedGradients = Literal["whole", "partial"]

_KEPT = 2  # contents of one mask that a shard remembers how to move for
_numbers = itertools.count()
_shards: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()  # as compiled code knows them


def shard_of(number: int) -> Shard:
    """The shard of this number in this process. Raises: `NotPlanned`."""
    found = _shards.get(number)
    if found is None:
        raise errors.NotPlanned(
            "compiled code was made for a shard that is gone; keep what cp.plan gave, and call again"
        )
    return found


@dataclass(eq=False)
class Options:
    """What `ca.ContextParallel` is made with, which says what each option means."""

    ranks: Ranks
    method: Method
    parts: int | None
    keep_fetched: bool
    captured_gradients: CapturedGradients


class Shard:
    """A sequence divided among ranks: which tokens are this rank's, and how its attentions see the others'."""

    def __init__(self, cp: Options, division: Division, packed: Packed | None, varlen: Varlen | None) -> None:
        self.cp, self.division, self.packed, self.varlen = cp, division, packed, varlen
        self.seq_len = division.visits.tile * division.visits.tiles
        self.rank = cp.ranks.rank
        each = [
            Movement.of(division, division.visits.seen, r, gather=False, parts=1).positions
            for r in range(cp.ranks.size)
        ]
        self._order = torch.cat(each)
        self.positions = each[self.rank]
        self._plans: dict[Any, OrderedDict[Any, SharedPlan]] = {}  # by form, then by what the mask reads
        self._last: SharedPlan | None = None
        self.number = next(_numbers)
        _shards[self.number] = self

    @property
    def rows(self) -> int:
        """How many tokens a rank has."""
        return len(self.positions)

    def scatter(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's rows of `x` (all tokens along `dim`), in the order of `positions`; differentiable.

        Raises: `WrongShare`.
        """
        self._check_length(x, dim, self.seq_len, "the sequence")
        return x.index_select(dim, self.positions.to(x.device))

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All ranks' rows of `x` (this rank's along `dim`), in the order of the sequence; differentiable.

        Raises: `WrongShare`, `WrongDeviceForGroup`, `RankUnreachable`.
        """
        self._check_length(x, dim, self.rows, "a rank's share")
        self.cp.ranks.check_device(x.device)
        found: torch.Tensor = _Gather.apply(self, x, dim)  # type: ignore[no-untyped-call]
        return found

    def _check_length(self, x: torch.Tensor, dim: int, length: int, of: str) -> None:
        if not isinstance(x, torch.Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != length:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise errors.WrongShare(f"got {shape}, whose dimension {dim} is not {length} long, as {of} is; pass dim=")

    def explain(self, attn: Any = None, shape: TensorSizes | None = None) -> Described:
        """Who computes what: per rank rows, pairs, bytes to fetch, parts, and what overlaps; prints as text.

        attn: as in `plan`, by default what was planned for. shape: heads and dimensions that bytes are counted for, by
            default those of the last call.
        """
        if shape is None:
            last, ranks = self._last, self.cp.ranks.size
            shape = TensorSizes(heads=ranks, kv_heads=ranks) if last is None else last.traffic.shape
        seen = self.division.visits.seen
        if attn is not None:
            v = self.division.visits
            seen = visits_of(Graphs.of(None, mask_of(attn), self.packed).mask, self.seq_len, v.tile, v.grain).seen
        traffic = choose_traffic(self.cp.method, self.cp.parts, self.division, seen, shape)
        return describe(self.division, seen, traffic)

    # --- calls ------------------------------------------------------------------------------------------------

    def attend(self, mods: Mods, options: tuple[Any, ...], inputs: Inputs, asked: Asked) -> Any:
        """What `attention` gives for this rank's rows.

        Raises: what `attention` raises, `WrongShare`, `UnsupportedInParallel`, `WrongDeviceForGroup`, `RanksDisagree`,
        `CapturedTensorsDiffer`, `HeadsIndivisible`, `RankUnreachable`.
        """
        inputs = inputs.autocast
        q, k, v = self.dense(inputs)
        given = given_of(mods, q.shape[1])._replace(max_scores=asked.max_scores)
        if copies.made:
            copies.refuse_outdated(given.tensors)
        planned = self.planned(mods, options, (q, k, v), given.tensors)
        out, lse, top = attend(planned.strategy, q, k, v, given, self.cp.captured_gradients == "whole")
        if inputs.q.ndim == 3:
            out, lse, top = out[0].transpose(0, 1), lse[0], None if top is None else top[0]
        return asked_of((out, lse, top), asked)

    def dense(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as (B, H, rows, D), checked. Raises: see `attend`."""
        if transforms.active():
            raise errors.UnsupportedInParallel(
                "a transform of torch.func around an attention that ranks share is not served; apply it on one rank"
            )
        if inputs.paged is not None:
            raise errors.UnsupportedInParallel("keys in pages are for inference on one rank; pass k and v as tensors")
        if inputs.varlen is not None and self.varlen is None:
            raise errors.UnsupportedInParallel(
                "the sequence was planned without varlen; pass it to cp.plan(attn, total, varlen=...)"
            )
        q, k, v = inputs[:3]
        if self.varlen is not None and all(isinstance(t, torch.Tensor) and t.ndim == 3 for t in (q, k, v)):
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        refuse_eight_bits(Problem.of(q, k, v).types)
        for name, t in zip("qkv", (q, k, v), strict=True):
            if t.shape[2] != self.rows:
                raise errors.WrongShare(
                    f"{name} has {t.shape[2]} rows, and this rank's share of {self.seq_len} tokens is {self.rows}; "
                    "pass what comes of shard.scatter(tokens)"
                )
        self.cp.ranks.check_device(q.device)
        return Inputs(q, k, v).resolved[:3]

    def planned(
        self,
        mods: Mods,
        options: tuple[Any, ...],
        qkv: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        counted: bool = True,
    ) -> SharedPlan:
        """How ranks share this attention: remembered while its mask reads what it read then.

        counted: whether torch counts the writes to what the mask reads; else its contents are looked at.
        """
        mask, (q, k, v) = mods[1], qkv
        places = {id(t): n for n, t in enumerate(given)}
        form = (
            *(None if m is None else m.form for m in mods),
            q.shape, k.shape, v.shape, q.dtype, q.device, *((t.shape, t.dtype, t.requires_grad) for t in given),
            *map(repr, options),
            *(places.get(id(leaf), id(leaf)) for m in mods if m is not None for leaf in m.leaves),
        )  # fmt: skip
        numbers = [leaf.value for leaf in (() if mask is None else mask.leaves) if isinstance(leaf, Scalar)]
        of_mask = tensors_of(mask)
        contents_now = (*numbers, *(map(_state, of_mask) if counted else [digest_of(of_mask)]))
        known = self._plans.setdefault(form, OrderedDict())
        found = known.get(contents_now)
        if found is None:
            self._last = found = known[contents_now] = self._made(mods, options, qkv, given, counted)
            while len(known) > _KEPT:
                known.popitem(last=False)
        return found

    def _made(
        self,
        mods: Mods,
        options: tuple[Any, ...],
        qkv: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        counted: bool,
    ) -> SharedPlan:
        (score, mask, _), (q, k, v) = mods, qkv
        agree(self.cp.ranks, _call_said(mods, options, qkv, given))
        visits, ranks = self.division.visits, self.cp.ranks
        graphs = Graphs.of(score, mask, self.packed)
        read_by_score = {id(t) for t in tensors_of(score) if t.is_floating_point()}
        constant = [t for t in tensors_of(mask) if id(t) not in read_by_score]
        seen = visits_of(graphs.mask, self.seq_len, visits.tile, visits.grain, q.shape[0], q.shape[1]).seen
        shape = TensorSizes(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
        traffic = choose_traffic(self.cp.method, self.cp.parts, self.division, seen, shape)
        strategy: Strategy
        if traffic.method == "heads":
            runs = OffsetMods.of(graphs, given, constant, self.seq_len, runs=True, heads=True)
            strategy = ByHeads(ranks, runs, options, self._order.to(q.device), self.cp.keep_fetched)
        else:
            movement = Movement.of(
                self.division, seen, self.rank, gather=traffic.method == "gather", parts=traffic.parts
            )
            runs, tabled = (
                OffsetMods.of(graphs, given, constant, self.seq_len, runs=are_runs) for are_runs in (True, False)
            )
            strategy = ByKeys(ranks, movement, runs, tabled, options, self.seq_len, q.device, self.cp.keep_fetched)
        of_constant = {id(t) for t in constant}
        pinned = {n: t if counted else t.detach().clone() for n, t in enumerate(given) if id(t) in of_constant}
        return SharedPlan(strategy, traffic, pinned)


class SharedPlan:
    """How ranks share one attention.

    pinned: what its mask read, by the place among the given tensors: nothing else takes over that memory, and where
    torch does not count the writes to it, calls read this copy.
    """

    def __init__(self, strategy: Strategy, traffic: Traffic, pinned: dict[int, torch.Tensor]) -> None:
        self.strategy, self.traffic, self.pinned = strategy, traffic, pinned

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The given tensors of a call, those that are pinned in their places."""
        return [self.pinned.get(n, t) for n, t in enumerate(tensors)]


class _Gather(torch.autograd.Function):
    """Rows of all ranks; of the gradient, each rank takes what belongs to its own rows and all ranks' uses of them."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.shard, ctx.dim = shard, dim
        rows, pending = shard.cp.ranks.gather(x.movedim(dim, 0).contiguous())
        pending.arrived()
        found = torch.empty_like(rows)
        found[shard._order.to(x.device)] = rows
        return found.movedim(0, dim)

    @staticmethod
    @left_alone
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shard, ranks = ctx.shard, ctx.shard.cp.ranks
        rows = grad.movedim(ctx.dim, 0)[shard._order.to(grad.device)].contiguous()
        found = torch.empty_like(rows)
        each = [[[x] for x in t.split(shard.rows)] for t in (rows, found)]
        ranks.exchange(*each).arrived()
        found = found.unflatten(0, (ranks.size, -1))
        total = found[0].clone()
        for n in range(1, ranks.size):  # in the order of ranks
            total += found[n]
        return None, total.movedim(0, ctx.dim), None


def refuse_eight_bits(keys: Sequence[torch.dtype] = EIGHT_BITS) -> None:
    """Raises `UnsupportedInParallel` for k and v of these types: ranks have no scales of others' rows."""
    if any(dtype in EIGHT_BITS for dtype in keys):
        raise errors.UnsupportedInParallel(
            "tensors of 8 bits are not taken where ranks share a sequence; pass 16-bit q, k and v, "
            "ca.Quantized.dequantised() of each"
        )


def given_of(mods: Mods, heads: int) -> Given:
    """The tensors that the mods of a call read, each once, and which of them has the sinks. Raises: `ShapeMismatch`."""
    given = list({id(t): t for mod in mods for t in tensors_of(mod)}.values())
    sink = mods[2]
    if sink is None:
        return Given(given)
    (sinks,) = sink.leaves
    if len(sinks) != heads:
        raise errors.ShapeMismatch(f"sinks has {len(sinks)} numbers for {heads} query heads; it needs one each")
    return Given(given, sink=next(n for n, t in enumerate(given) if t is sinks))


def tensors_of(mod: Mod | None) -> list[torch.Tensor]:
    """What a mod captures, each once."""
    leaves = () if mod is None else mod.leaves
    return list({id(t): t for t in leaves if isinstance(t, torch.Tensor)}.values())


def _state(t: torch.Tensor) -> tuple[Any, ...]:
    """Changes when a tensor was written to, or is another; who keeps it holds the tensor."""
    version = object() if t.is_inference() else t._version  # of an inference tensor nobody says
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg(), version


def _call_said(
    mods: Mods,
    options: tuple[Any, ...],
    qkv: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
) -> list[Said]:
    (score, mask, sink), (q, k, v) = mods, qkv
    captured = [(tuple(t.shape), t.dtype, t.requires_grad) for t in given]
    return [
        Said("the shapes of q, k and v", [tuple(t.shape) for t in (q, k, v)]),
        Said("dtype", q.dtype),
        Said("captured tensors", captured, errors.CapturedTensorsDiffer),
        Said("mask", None if mask is None else mask.form),
        Said("score mod", None if score is None else score.form),
        Said("whether there are sinks", sink is not None),
        Said("what the mask captures", digest_of(tensors_of(mask)), errors.CapturedTensorsDiffer),
        Said("options (scale, backend, deterministic, schedule)", options),
        Said("which of q, k and v want gradients", [t.requires_grad for t in (q, k, v)]),
    ]


def mask_of(attn: Any) -> Mask | None:
    """The mask of what `plan` was given."""
    if attn is None or isinstance(attn, Mask):
        return attn
    if isinstance(attn, Pinned) or hasattr(type(attn), "current_mask"):
        return attn.current_mask  # type: ignore[no-any-return]
    if callable(attn) and not isinstance(attn, torch.nn.Module | torch.Tensor):
        return Mask.of(attn)
    raise errors.InvalidParallelOption(
        f"plan got a {type(attn).__name__}; pass a ca.Attention, a ca.nn.Attention, a mask_mod, or a list of them"
    )
