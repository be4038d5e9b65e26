"""An expression on torch tensors, each part at its own broadcast shape: the meaning of every graph.

Used by the reference (fp64) and streaming backends and by every check of the analysis.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import DivisionByZero
from .expr import Dep, DType, Expr, walk
from .linear import bounds, forget
from .ops import CASTS, MIRRORED, OPS


@dataclass
class Env:
    """Values for the leaves; any mutually broadcastable shapes, integers as int64.

    `float_dtype` is the type that floats have, and are computed in unless a captured tensor has fp64. `tensors` maps
    a captured tensor object to what is read in its place (a leaf that requires grad, a copy on another device).
    `scalars` maps a `ca.scalar` to the value it had when the call began: a backward must not see a later one. `reads`
    receives, for every read, what was asked before clamping, so that a caller can check it where the mask is visible.
    `deciding`: comparisons and positions that no score has a part in are computed in fp32 of these tensors, as torch
    does whatever the score has; None: as all else.
    """

    index: Mapping[str, torch.Tensor | int]
    score: torch.Tensor | None = None
    float_dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    reads: list[tuple[Expr, torch.Tensor]] | None = None
    scalars: Mapping[int, float] = field(default_factory=dict)
    deciding: Mapping[int, torch.Tensor] | None = None

    def tensor_of(self, node: Expr) -> torch.Tensor:
        tensor: torch.Tensor = node.attr.tensor
        return self.tensors.get(id(tensor), tensor)


def evaluate(root: Expr, env: Env) -> torch.Tensor:
    """Value of `root`; shape is the broadcast of what it depends on."""
    return evaluate_all([root], env)[0]


def evaluate_all(roots: list[Expr], env: Env) -> list[torch.Tensor]:
    """Values of several roots, shared parts once."""
    nodes = list(walk(*roots))
    wide = _widened(env, nodes)
    memo: dict[int, Any] = {} if env.deciding is None else _decided(nodes, env, env.deciding)
    for node in nodes:
        if id(node) not in memo:
            memo[id(node)] = _value(node, [memo[id(a)] for a in node.args], wide)
    found = [memo[id(r)] for r in roots]
    return found if wide is env else _narrowed(found, env)


def _decided(nodes: Iterable[Expr], env: Env, tensors: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    """What is made of floats and is none, where no score has a part in it: a comparison, a position to read."""
    narrow = replace(env, score=None, float_dtype=torch.float32, tensors=tensors, deciding=None)
    found = [n for n in nodes if _decides(n)]
    return dict(zip(map(id, found), evaluate_all(found, narrow), strict=True))


def _decides(node: Expr) -> bool:
    kinds = [a.dtype for a in node.args]
    return node.dtype is not DType.FLOAT and DType.FLOAT in kinds and not node.deps & Dep.SCORE


def _widened(env: Env, nodes: Iterable[Expr]) -> Env:
    """`env`, with floats in fp64 where a captured tensor is: of times since 1970, fp32 keeps steps of 128 s."""
    if env.float_dtype is torch.float64:
        return env
    wide = any(node.op == "read" and env.tensor_of(node).dtype is torch.float64 for node in nodes)
    return replace(env, float_dtype=torch.float64) if wide else env


def _narrowed(values: list[torch.Tensor], env: Env) -> list[torch.Tensor]:
    return [v.to(env.float_dtype) if v.is_floating_point() else v for v in values]


class Repeated:
    """Several roots, evaluated again and again at the same indices while tensors and run-time numbers change.

    What depends on neither is computed once, and so are the positions of reads that depend on neither.
    """

    def __init__(self, roots: list[Expr], env: Env) -> None:
        nodes = list(walk(*roots))
        self.roots, self.asked, self.env = roots, env, _widened(env, nodes)
        env = self.env
        self.fixed: dict[int, Any] = {}
        self.places: dict[int, tuple[torch.Tensor, ...]] = {}
        self.steps: list[Expr] = []
        for node in nodes:
            known = all(id(a) in self.fixed for a in node.args)
            if not known or node.op in ("read", "scalar"):
                self.steps.append(node)
            if known and node.op == "read":
                self.places[id(node)] = _places(node, [self.fixed[id(a)] for a in node.args], env)
            elif known and node.op != "scalar":
                self.fixed[id(node)] = _value(node, [self.fixed[id(a)] for a in node.args], env)

    def __call__(self) -> list[torch.Tensor]:
        """The values of now."""
        memo = dict(self.fixed)
        for node in self.steps:
            places = self.places.get(id(node))
            if places is None:
                memo[id(node)] = _value(node, [memo[id(a)] for a in node.args], self.env)
            else:
                memo[id(node)] = _element(node, places, self.env)
        return _narrowed([memo[id(r)] for r in self.roots], self.asked)


def _position(node: Expr, env: Env) -> Any:
    value = env.index[node.attr]
    return value.to(env.device) if isinstance(value, torch.Tensor) else _number(value, torch.int64, env)


def _scalar(node: Expr, env: Env) -> Any:
    value = env.scalars.get(id(node.attr), node.attr.value)
    return _number(value, _torch_type(node.dtype, env), env)


_LEAVES: dict[str, Callable[[Expr, Env], Any]] = {
    "const": lambda node, env: _number(node.attr, _torch_type(node.dtype, env), env),
    "index": _position,
    "score": lambda node, env: env.score,
    "scalar": _scalar,
    "size": lambda node, env: _number(env.tensor_of(node).shape[node.args[0].attr], torch.int64, env),
}


def _value(node: Expr, args: list[Any], env: Env) -> Any:
    if node.op in _LEAVES:
        return _LEAVES[node.op](node, env)
    if node.op == "read":
        return _element(node, _places(node, args, env), env)
    wanted = _torch_type(node.dtype, env)
    if node.op.startswith("cast_"):
        target = CASTS[node.op.removeprefix("cast_")][0]
        return args[0].to(target).to(wanted)
    if node.op == "where":
        return torch.where(args[0], args[1].to(wanted), args[2].to(wanted))
    if node.op in MIRRORED:
        common = env.float_dtype if any(a.dtype is DType.FLOAT for a in node.args) else torch.int64
        return OPS[node.op].torch(*(a.to(common) for a in args))
    if node.dtype is DType.BOOL:
        return OPS[node.op].torch(*args)
    if node.op in _CLAMPS and node.args[1].is_const:  # of two zeros a tensor's end may be the other one
        return torch.clamp(args[0].to(wanted), **{_CLAMPS[node.op]: node.args[1].attr})
    try:
        return OPS[node.op].torch(*(a.to(wanted) for a in args))
    except RuntimeError as error:
        if "ZeroDivisionError" not in str(error):
            raise
        raise DivisionByZero(
            f"{node} divides integers by zero at some pair of queries and keys, which a mask around it does not keep "
            "from happening; give the divisor a least value: x // y.clamp(min=1)"
        ) from None


_CLAMPS = {"clamp_min": "min", "clamp_max": "max"}


def _number(value: float, dtype: torch.dtype, env: Env) -> torch.Tensor:
    # filled on the device: a copy from the host would wait for it
    if dtype.is_floating_point and math.isfinite(value) and abs(value) > torch.finfo(dtype).max:
        value = math.copysign(math.inf, value)  # as the conversion of a tensor gives
    return torch.full((), value, dtype=dtype, device=env.device)


def _torch_type(dtype: DType, env: Env) -> torch.dtype:
    if dtype is DType.FLOAT:
        return env.float_dtype
    return torch.bool if dtype is DType.BOOL else torch.int64


def _element(node: Expr, places: tuple[torch.Tensor, ...], env: Env) -> torch.Tensor:
    tensor = env.tensor_of(node)
    # not by a subclass's own __getitem__: what that does is in the graph
    value = torch.Tensor.__getitem__(tensor, places) if places else tensor
    return value.to(_torch_type(node.dtype, env))


def _places(node: Expr, indices: list[Any], env: Env) -> tuple[torch.Tensor, ...]:
    """Negative positions count from the end, as in torch; positions outside are clamped, and reported in `reads`."""
    tensor = env.tensor_of(node)
    where = []
    outside: Any = None
    for index, i, size in zip(node.args, indices, tensor.shape, strict=True):
        if index.is_const and 0 <= index.attr < size:
            where.append(index.attr)
            continue
        wrapped = torch.where(i < 0, i + size, i) if _may_be_negative(index) else i
        if env.reads is not None:
            bad = (wrapped < 0) | (wrapped >= size)
            outside = bad if outside is None else outside | bad
        where.append(wrapped.clamp(0, max(size - 1, 0)))
    if outside is not None and env.reads is not None:
        env.reads.append((node, outside))
    return tuple(where)


_signs: weakref.WeakKeyDictionary[Expr, bool] = weakref.WeakKeyDictionary()


def _may_be_negative(index: Expr) -> bool:
    """Whether nothing proves that an index counts from the front: three operations on the device fewer.

    Positions of a tile do. Those of an element may be any that a mod was called with, by whoever calls one.
    """
    if index.deps & (Dep.B | Dep.H | Dep.Q | Dep.KV):
        return True
    found = _signs.get(index)
    if found is None:
        found = _signs[index] = bounds(index)[0] < 0
        forget()
    return found
