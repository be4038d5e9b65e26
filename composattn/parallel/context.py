"""`ca.ContextParallel`: a sequence that the ranks of a mesh share, divided by what its mask leaves to do."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import errors
from ..call.inputs import Asked, Inputs
from ..call.problem import Problem
from ..call.sequences import Varlen
from ..dispatch import transforms
from ..dispatch.held import Held
from ..dispatch.planned import asked_of
from ..dispatch.spoken import SharedMods as Mods
from ..graph.scalar import Scalar
from ..mods.mask import Mask
from ..mods.mod import Mod
from .agreement import Said, agree, contents
from .attend import ByHeads, ByKeys, Given, Way, attend
from .describe import Described, describe
from .division import TOLERANCE, Division, divide
from .exchange import Ranks
from .movement import Movement
from .placed import Graphs, Packed, Placed
from .traffic import METHODS, Shape, Traffic, chosen
from .visits import Visits, grain_for, tile_for, visits_of

Method = Literal["auto", "exchange", "gather", "heads"]
_KEPT = 2  # contents of one mask that a shard remembers how to move for

_numbers = itertools.count()
_shards: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()  # as compiled code knows them

_entered: list[ContextParallel] = []  # of the process: a backward that recomputes runs in a thread of torch's own


def active() -> Shard | None:
    """The shard that calls now belong to, None outside of any `with cp:`. Raises: `NotPlanned`."""
    return _entered[-1].shard if _entered else None


def shard_of(number: int) -> Shard:
    """The shard of this number in this process. Raises: `NotPlanned`."""
    found = _shards.get(number)
    if found is None:
        raise errors.NotPlanned(
            "compiled code was made for a shard that is gone; keep what cp.plan gave, and call again"
        )
    return found


class ContextParallel:
    """Ranks that share sequences: each holds some of the tokens, and attention sees all of them.

        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("cp",))
        cp = ca.ContextParallel(mesh)
        shard = cp.plan(attn, seq_len)          # who has which tokens, from the mask
        x = shard.scatter(tokens)               # this rank's, positions and labels alike
        with cp:                                # around forward and backward
            loss = loss_of(model(x))            # attn(q, k, v) inside sees rows of all ranks
            loss.backward()
        out = shard.gather(out)                 # all tokens again, in order

    mesh: a `DeviceMesh`; with several dimensions say which one: `dim`, a name or a number. A process group serves too.
    method: how keys come. "exchange": each rank fetches the rows that its queries see. "gather": all of them. "heads":
        heads are shared instead of rows while attention runs. "auto": what receives the fewest bytes.
    parts: in how many parts keys are computed with; 1: all at once, when they are there; 2: the rank's own while the
        others come; more: those in turns. None: by how long both take.
    keep_fetched: whether a backward finds the fetched keys as the forward had them, or fetches them again.
    captured_gradients: "whole": tensors that mods read get the gradient of all ranks' rows. "partial": of this rank's,
        as all other parameters do, for FSDP or DDP over a mesh that includes this dimension.
    timeout: seconds that a rank waits for the others where it can; None: as long as the process group does.

    Raises: `NoProcessGroup`, `MeshMismatch`, `InvalidParallelOption`.
    """

    def __init__(
        self,
        mesh: Any,
        *,
        dim: str | int | None = None,
        method: Method = "auto",
        parts: int | None = None,
        keep_fetched: bool = True,
        captured_gradients: Literal["whole", "partial"] = "whole",
        timeout: float | None = None,
    ) -> None:
        _check_options(method, parts, keep_fetched, captured_gradients, timeout)
        self.ranks = Ranks(_group_of(mesh, dim), timeout)
        self.method, self.parts, self.keep_fetched = method, parts, keep_fetched
        self.captured_gradients = captured_gradients
        self._shard: Shard | None = None

    @property
    def shard(self) -> Shard:
        """The one that was planned last. Raises: `NotPlanned`."""
        if self._shard is None:
            raise errors.NotPlanned(
                "this ca.ContextParallel has divided no sequence yet; call cp.plan(attn, seq_len) before `with cp:`"
            )
        return self._shard

    def plan(
        self,
        attn: Any = None,
        seq_len: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        varlen: Varlen | None = None,
        tile: int | None = None,
        tolerance: float = TOLERANCE,
    ) -> Shard:
        """Divides a sequence of `seq_len` tokens among the ranks, by the work that the mask of `attn` leaves.

        attn: a `ca.Attention`, `ca.nn.Attention`, a mask or mask_mod, or several of them in a list: those of one model,
            whose layers share one division. None sees everything.
        batch, heads: of a mask that differs between them. varlen: packed sequences, `seq_len` is then their total.
        tile: rows that stay together; the default leaves 64 tiles a rank or more where the sequence is long enough.
        tolerance: how much more than the average the rank with the most pairs may have.

        Plan again when the mask's documents change: a division of an old mask stays right, but not even. Every rank
        calls it, with the same. Raises: `IndivisibleSequence`, `RanksDisagree`, `RankUnreachable`,
        `InvalidParallelOption`, `UnsupportedInParallel`.
        """
        packed, seq_len = _packed(varlen, seq_len)
        _check_plan(seq_len, batch, heads, tolerance)
        masks = [_mask_of(a) for a in (attn if isinstance(attn, list | tuple) else [attn])]
        said = [Said("seq_len", seq_len), Said("batch", batch), Said("heads", heads), Said("tile", tile)]
        failed: Exception | None = None
        try:  # what one rank refuses the others must hear of, or they would wait for it
            rows = tile_for(seq_len, self.ranks.size, tile)
            graphs = [Graphs.of(None, mask, packed) for mask in masks]
            visits = _visits(graphs, seq_len, rows, grain_for(seq_len, rows), batch, heads)
            division = divide(visits, self.ranks.size, tolerance)
        except errors.ComposattnError as error:
            failed = error
        said += [
            Said("whether the sequence can be divided", failed is None),
            Said("the masks", [None if m is None else m.form for m in masks], errors.RanksDisagree),
            Said("what masks capture", contents([t for m in masks for t in _tensors(m)]), errors.CapturedTensorsDiffer),
            Said("varlen", None if varlen is None else contents([varlen.cu_seqlens_q]), errors.RanksDisagree),
        ]
        try:
            agree(self.ranks, said)
        except errors.RanksDisagree as differs:
            raise (failed or differs) from (differs if failed else None)
        if failed is not None:
            raise failed
        self._shard = Shard(self, division, packed, varlen)
        return self._shard

    def __enter__(self) -> ContextParallel:
        self.shard  # noqa: B018  raises where there is none
        _entered.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.remove(self)

    def __repr__(self) -> str:
        ranks = self.ranks
        return f"ContextParallel(rank {ranks.rank} of {ranks.size}, {ranks.backend}, method={self.method!r})"


class Shard:
    """A sequence divided among ranks: which tokens are this rank's, and how its attentions see the others'."""

    def __init__(self, cp: ContextParallel, division: Division, packed: Packed | None, varlen: Varlen | None) -> None:
        self.cp, self.division, self.packed, self.varlen = cp, division, packed, varlen
        self.seq_len = division.visits.tile * division.visits.tiles
        self.rank = cp.ranks.rank
        each = [
            Movement.of(division, division.visits.seen, r, gather=False, parts=1).positions
            for r in range(cp.ranks.size)
        ]
        self._order = torch.cat(each)
        self.positions = each[self.rank]
        self._ways: dict[Any, OrderedDict[Any, Planned]] = {}  # by form, then by what the mask reads
        self._last: Planned | None = None
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

    def explain(self, attn: Any = None, shape: Shape | None = None) -> Described:
        """Who computes what: per rank rows, pairs, bytes to fetch, parts, and what overlaps; prints as text.

        attn: as in `plan`, by default what was planned for. shape: heads and dimensions that bytes are counted for, by
            default those of the last call.
        """
        if shape is None:
            last, ranks = self._last, self.cp.ranks.size
            shape = Shape(heads=ranks, kv_heads=ranks) if last is None else last.traffic.shape
        seen = self.division.visits.seen
        if attn is not None:
            v = self.division.visits
            seen = visits_of(Graphs.of(None, _mask_of(attn), self.packed).mask, self.seq_len, v.tile, v.grain).seen
        traffic = chosen(self.cp.method, self.cp.parts, self.division, seen, shape)
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
        planned = self.planned(mods, options, (q, k, v), given.tensors)
        out, lse, top = attend(planned.way, q, k, v, given, self.cp.captured_gradients == "whole")
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
        Problem.of(q, k, v)
        for name, t in zip("qkv", (q, k, v), strict=True):
            if t.shape[2] != self.rows:
                raise errors.WrongShare(
                    f"{name} has {t.shape[2]} rows, and this rank's share of {self.seq_len} tokens is {self.rows}; "
                    "pass what comes of shard.scatter(tokens)"
                )
        self.cp.ranks.check_device(q.device)
        return q, k, v

    def planned(
        self,
        mods: Mods,
        options: tuple[Any, ...],
        qkv: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        counted: bool = True,
    ) -> Planned:
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
        of_mask = _tensors(mask)
        contents_now = (*numbers, *(map(_state, of_mask) if counted else [contents(of_mask)]))
        known = self._ways.setdefault(form, OrderedDict())
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
    ) -> Planned:
        (score, mask, _), (q, k, v) = mods, qkv
        agree(self.cp.ranks, _call_said(mods, options, qkv, given))
        visits, ranks = self.division.visits, self.cp.ranks
        graphs = Graphs.of(score, mask, self.packed)
        read_by_score = {id(t) for t in _tensors(score) if t.is_floating_point()}
        kept = [t for t in _tensors(mask) if id(t) not in read_by_score]
        seen = visits_of(graphs.mask, self.seq_len, visits.tile, visits.grain, q.shape[0], q.shape[1]).seen
        shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
        traffic = chosen(self.cp.method, self.cp.parts, self.division, seen, shape)
        way: Way
        if traffic.method == "heads":
            runs = Placed.of(graphs, given, kept, self.seq_len, runs=True, heads=True)
            way = ByHeads(ranks, runs, options, self._order.to(q.device), self.cp.keep_fetched)
        else:
            movement = Movement.of(
                self.division, seen, self.rank, gather=traffic.method == "gather", parts=traffic.parts
            )
            runs, tabled = (Placed.of(graphs, given, kept, self.seq_len, runs=are_runs) for are_runs in (True, False))
            way = ByKeys(ranks, movement, runs, tabled, options, self.seq_len, q.device, self.cp.keep_fetched)
        of_kept = {id(t) for t in kept}
        held = {n: t if counted else t.detach().clone() for n, t in enumerate(given) if id(t) in of_kept}
        return Planned(way, traffic, held)


class Planned:
    """How ranks share one attention.

    held: what its mask read, by the place among the given tensors: nothing else takes over that memory, and where
    torch does not count the writes to it, calls read this copy.
    """

    def __init__(self, way: Way, traffic: Traffic, held: dict[int, torch.Tensor]) -> None:
        self.way, self.traffic, self.held = way, traffic, held

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The given tensors of a call, those that are held in their places."""
        return [self.held.get(n, t) for n, t in enumerate(tensors)]


class _Gather(torch.autograd.Function):
    """Rows of all ranks; of the gradient, each rank takes what belongs to its own rows and all ranks' uses of them."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.shard, ctx.dim = shard, dim
        rows = shard.cp.ranks.gather(x.movedim(dim, 0).contiguous()).arrived()
        found = torch.empty_like(rows)
        found[shard._order.to(x.device)] = rows
        return found.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shard, ranks = ctx.shard, ctx.shard.cp.ranks
        rows = grad.movedim(ctx.dim, 0)[shard._order.to(grad.device)].contiguous()
        each = [shard.rows] * ranks.size
        found = ranks.exchange(rows, each, each).arrived().unflatten(0, (ranks.size, -1))
        total = found[0].clone()
        for n in range(1, ranks.size):  # in the order of ranks
            total += found[n]
        return None, total.movedim(0, ctx.dim), None


def _group_of(mesh: Any, dim: str | int | None) -> Any:
    """The process group of a mesh's dimension, or the group itself. Raises: `NoProcessGroup`, `MeshMismatch`."""
    if not dist.is_available() or not dist.is_initialized():
        raise errors.NoProcessGroup(
            "torch.distributed has no process group; start the program with torchrun, and call "
            "torch.distributed.init_process_group() or init_device_mesh(...) before"
        )
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "mesh_dim_names"):
        raise errors.NoProcessGroup(f"mesh is a {type(mesh).__name__}; pass a DeviceMesh, or a process group")
    names = mesh.mesh_dim_names or ()
    if dim is None and mesh.ndim > 1:
        raise errors.MeshMismatch(
            f"the mesh has dimensions {names or tuple(range(mesh.ndim))}; say which of them shares sequences: dim="
        )
    if dim is not None and (dim not in names if isinstance(dim, str) else not 0 <= dim < mesh.ndim):
        raise errors.MeshMismatch(f"the mesh has no dimension {dim!r}; it has {names or tuple(range(mesh.ndim))}")
    if mesh.get_coordinate() is None:
        raise errors.MeshMismatch(f"this process, rank {dist.get_rank()}, is not among the ranks of the mesh")
    return mesh.get_group(0 if dim is None else dim)


def _check_options(method: Any, parts: Any, keep: Any, gradients: Any, timeout: Any) -> None:
    """Raises `InvalidParallelOption` for a value that an option does not take."""
    whole = isinstance(parts, int) and not isinstance(parts, bool)
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    for name, value, good, takes in (
        ("method", method, method in METHODS, " or ".join(map(repr, METHODS))),
        ("parts", parts, parts is None or (whole and parts >= 1), "a number of parts from 1 on, or None"),
        ("keep_fetched", keep, isinstance(keep, bool), "True or False"),
        ("captured_gradients", gradients, gradients in ("whole", "partial"), "'whole' or 'partial'"),
        ("timeout", timeout, timeout is None or (number and timeout > 0), "seconds, or None"),
    ):
        if not good:
            raise errors.InvalidParallelOption(f"{name} is {value!r}; it must be {takes}")


def _check_plan(seq_len: Any, batch: Any, heads: Any, tolerance: Any) -> None:
    """Raises `InvalidParallelOption` for what can't be divided."""
    for name, value in (("seq_len", seq_len), ("batch", batch), ("heads", heads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise errors.InvalidParallelOption(f"{name} is {value!r}; it must be an int of at least 1")
    if not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise errors.InvalidParallelOption(
            f"tolerance is {tolerance!r}; it must be a number of at least 0, such as 0.03"
        )


def _packed(varlen: Any, seq_len: Any) -> tuple[Packed | None, Any]:
    """Packed sequences as tables, and how many rows there are. Raises: `UnsupportedInParallel`, `WrongShare`."""
    if varlen is None:
        return None, seq_len
    if not isinstance(varlen, Varlen):
        raise errors.InvalidParallelOption(f"varlen is a {type(varlen).__name__}; pass ca.Varlen(cu_seqlens)")
    if varlen.cu_seqlens_k is not None and not torch.equal(varlen.cu_seqlens_k, varlen.cu_seqlens_q):
        raise errors.UnsupportedInParallel("keys packed unlike queries are not served; ranks share one sequence")
    if varlen.seqused_k is not None and varlen.seqused_q is not varlen.seqused_k:
        raise errors.UnsupportedInParallel("seqused_k without the same seqused_q is not served; mask the keys instead")
    total = int(varlen.cu_seqlens_q[-1])
    if seq_len is not None and seq_len != total:
        raise errors.WrongShare(f"cu_seqlens ends with {total} and seq_len is {seq_len}; they must be the same")
    return Packed(varlen, total), total


def _mask_of(attn: Any) -> Mask | None:
    """The mask of what `plan` was given."""
    if attn is None or isinstance(attn, Mask):
        return attn
    if isinstance(attn, Held) or hasattr(type(attn), "current_mask"):
        return attn.current_mask  # type: ignore[no-any-return]
    if callable(attn) and not isinstance(attn, torch.nn.Module | torch.Tensor):
        return Mask.of(attn)
    raise errors.InvalidParallelOption(
        f"plan got a {type(attn).__name__}; pass a ca.Attention, a ca.nn.Attention, a mask_mod, or a list of them"
    )


def _visits(graphs: Sequence[Graphs], seq_len: int, tile: int, grain: int, batch: int, heads: int) -> Visits:
    """Those of all attentions of a model together."""
    first, *others = (visits_of(g.mask, seq_len, tile, grain, batch, heads) for g in graphs)
    for other in others:
        first = first.joined(other)
    return first


def given_of(mods: Mods, heads: int) -> Given:
    """The tensors that the mods of a call read, each once, and which of them has the sinks. Raises: `ShapeMismatch`."""
    given = list({id(t): t for mod in mods for t in _tensors(mod)}.values())
    sink = mods[2]
    if sink is None:
        return Given(given)
    (sinks,) = sink.leaves
    if len(sinks) != heads:
        raise errors.ShapeMismatch(f"sinks has {len(sinks)} numbers for {heads} query heads; it needs one each")
    return Given(given, sink=next(n for n, t in enumerate(given) if t is sinks))


def _tensors(mod: Mod | None) -> list[torch.Tensor]:
    """What a mod captures, each once."""
    leaves = () if mod is None else mod.leaves
    return list({id(t): t for t in leaves if isinstance(t, torch.Tensor)}.values())


def _state(t: torch.Tensor) -> tuple[Any, ...]:
    """Changes when a tensor was written to, or is another; who keeps it holds the tensor."""
    version = object() if t.is_inference() else t._version  # of an inference tensor nobody says
    return t.data_ptr(), t.shape, t.stride(), t.dtype, version


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
        Said("what the mask captures", contents(_tensors(mask)), errors.CapturedTensorsDiffer),
        Said("options (scale, backend, deterministic, schedule)", options),
        Said("which of q, k and v want gradients", [t.requires_grad for t in (q, k, v)]),
    ]
