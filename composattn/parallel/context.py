"""`ca.ContextParallel`: a sequence that the ranks of a mesh share, divided by what its mask leaves to do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import errors
from ..call.sequences import Varlen
from .agreement import Said, agree, digest_of
from .division import TOLERANCE, divide
from .exchange import Ranks
from .offset_mods import Graphs, Packed
from .shard import CapturedGradients, Method, Options, Shard, mask_of, tensors_of
from .traffic import METHODS
from .visits import Visits, grain_for, tile_for, visits_of

entered: list[ContextParallel] = []  # of the process: a backward that recomputes runs in a thread of torch's own


left: list[int] = []  # rows of shards whose `with cp:` is over


def active(q: torch.Tensor, compiling: bool) -> Shard | None:
    """The shard that a call with `q`, which torch compiles or not, belongs to; None outside of any `with cp:`.

    Raises: `NotPlanned`; `OutsideContextParallel` where a backward computes again what ranks may have shared.
    """
    if entered:
        return entered[-1].shard
    if not compiling and left and torch._C._current_graph_task_id() != -1:
        _refuse_recomputed(q)
    return None


def _refuse_recomputed(q: torch.Tensor) -> None:
    if not isinstance(q, torch.Tensor) or q.ndim not in (3, 4):
        return  # which is refused by the call itself
    rows = q.shape[-2] if q.ndim == 4 else q.shape[0]
    if rows in left:
        raise errors.OutsideContextParallel(
            f"a backward computes an attention of {rows} rows again (activation checkpointing), after the "
            "`with cp:` of as many rows was left; this rank would attend to its own rows only. Keep loss.backward() "
            "inside of `with cp:`, or pass context_parallel=shard to the call"
        )


class ContextParallel(Options):
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
        captured_gradients: CapturedGradients = "whole",
        timeout: float | None = None,
    ) -> None:
        _check_options(method, parts, keep_fetched, captured_gradients, timeout)
        super().__init__(Ranks(_group_of(mesh, dim), timeout), method, parts, keep_fetched, captured_gradients)
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
        masks = [mask_of(a) for a in (attn if isinstance(attn, list | tuple) else [attn])]
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
            Said(
                "what masks capture",
                digest_of([t for m in masks for t in tensors_of(m)]),
                errors.CapturedTensorsDiffer,
            ),
            Said("varlen", None if varlen is None else digest_of([varlen.cu_seqlens_q]), errors.RanksDisagree),
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
        entered.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        entered.remove(self)
        if self.shard.rows not in left:
            left.append(self.shard.rows)

    def __repr__(self) -> str:
        ranks = self.ranks
        return f"ContextParallel(rank {ranks.rank} of {ranks.size}, {ranks.backend}, method={self.method!r})"


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
    numbers = tuple(range(mesh.ndim))
    names = mesh.mesh_dim_names or numbers
    if dim is None and mesh.ndim > 1:
        raise errors.MeshMismatch(f"the mesh has dimensions {names}; say which of them shares sequences: dim=")
    if dim is not None and dim not in (*names, *numbers):
        raise errors.MeshMismatch(f"the mesh has no dimension {dim!r}; it has {names}")
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


def _visits(graphs: Sequence[Graphs], seq_len: int, tile: int, grain: int, batch: int, heads: int) -> Visits:
    """The visits of all attentions of a model together."""
    return functools.reduce(Visits.joined, (visits_of(g.mask, seq_len, tile, grain, batch, heads) for g in graphs))
