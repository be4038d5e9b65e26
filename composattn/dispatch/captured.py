"""What tensors that mods read must be for a call: where they lie, how large they are, parameters still."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import errors
from ..analysis.other_sizes import refuse_other_sizes
from ..analysis.program import Program
from ..analysis.short_reads import refuse_short_reads
from ..call.block_sparse import Table
from ..call.problem import Problem, refuse_foreign, undense
from ..graph.expr import Expr, walk


def check_captures(program: Program, problem: Problem) -> bool:
    """Captured tensors lie where q does, except 0-d ones, which travel as numbers.

    Returns whether what they hold had a part in it; else it holds of all tensors of their forms.

    Raises: `BlockMaskMismatch`, `DeviceMismatch`, `UnsupportedCapture`, `ModShapeMismatch` for mods of more heads or
    sequences, `CapturedIndexOutOfRange` for a tensor that is shorter than what is read of it.
    """
    for capture in program.captures:
        if isinstance(capture, Table):
            # of packed sequences the lengths may be anything
            q_len = problem.q_len if problem.layout.q == "dense" else None
            kv_len = problem.kv_len if problem.layout.kv == "dense" else None
            capture.check(problem.batch, problem.q_heads, q_len, kv_len)
        tensor = capture.tensor
        refuse_foreign("a captured tensor", tensor)
        lies = undense(tensor)
        if lies is not None:
            raise errors.UnsupportedCapture(f"a captured tensor is {lies[0]}; capture a dense one: .{lies[1]}")
        if tensor.device != problem.device:
            raise errors.DeviceMismatch(
                f"a captured tensor of shape {tuple(tensor.shape)} lies on {tensor.device}, q on {problem.device}; "
                + _way_to(problem.device, tensor)
            )
        if tensor.ndim and tensor.numel() == 0:
            raise errors.UnsupportedCapture(f"a captured tensor of shape {tuple(tensor.shape)} has nothing to read")
    if program.sink is not None:
        _check_sink(program.sink, problem)
    sizes = {"b": problem.batch, "h": problem.q_heads}
    refuse_other_sizes(program, sizes)
    if problem.layout.is_dense and problem.q_len and problem.kv_len:
        sizes |= {"q": problem.q_len, "kv": problem.kv_len}
    return refuse_short_reads(program, sizes, problem.device)


def _check_sink(sink: Expr, problem: Problem) -> None:
    """Raises `ShapeMismatch` where there are sinks of another number of heads."""
    for node in walk(sink):
        if node.op == "read" and node.attr.tensor.shape[-1] != problem.q_heads:
            raise errors.ShapeMismatch(
                f"sinks has {node.attr.tensor.shape[-1]} numbers for {problem.q_heads} query heads; it needs one each"
            )


def _way_to(device: torch.device, tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return (
            "it was captured before its module got memory; let ca.nn.Attention read it by name at each call, or make "
            "the ca.Attention after to_empty() and loading"
        )
    return f'move it: tensor.to("{device}"), or let ca.nn.Attention read it by name at each call'


def refuse_flattened(tensors: Iterable[torch.Tensor]) -> None:
    """Raises `CapturedTensorChanged` for a parameter that `FullyShardedDataParallel` took out of its module.

    It puts views of one flat parameter in its place, whose gradient alone it gathers.
    """
    for tensor in tensors:
        if getattr(tensor, "_fsdp_flattened", False):
            raise errors.CapturedTensorChanged(
                f"a captured parameter of shape {tuple(tensor.shape)} was made a part of a flat one by "
                "FullyShardedDataParallel, which would not train it; use ca.nn.Attention, or mods made in forward, "
                "that read it from the module by name at each call"
            )
