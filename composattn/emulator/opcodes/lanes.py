"""Instructions in which the lanes of a warp see each other: shuffles, votes, elect, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from composattn.emulator.findings import CollectiveMismatch, UnknownInstruction
from composattn.emulator.opcodes.registry import Handler, effect, source, target
from composattn.emulator.ptx import Discard, Imm, Instr, Operand, Pair, Reg

Array = np.ndarray[Any, Any]
LANE = np.arange(32)


def _active(g: Any, m: Any) -> Any:
    """[warp, lane]: who executes an instruction."""
    return np.ones((len(g.warps), 32), np.bool_) if m is True else m.reshape(-1, 32)


def _as_bits(lanes: Array) -> Array:
    """A word of each warp with the bits of its lanes."""
    return (lanes.astype(np.uint32) << LANE.astype(np.uint32)).sum(1, dtype=np.uint32)


def _members(g: Any, m: Any, mask_row: Array | None) -> None:
    """All lanes that an instruction names must execute it, and only they."""
    if mask_row is None and m is True:
        return
    active = _active(g, m)
    bits = _as_bits(active)
    for w in range(len(g.warps)):
        if not bits[w]:
            continue
        if mask_row is None:
            named = 0xFFFFFFFF
        else:
            values = mask_row.reshape(-1, 32)[w][active[w]]
            if (values != values[0]).any():
                raise CollectiveMismatch(f"lanes of warp {g.low + w} name different member masks")
            named = int(values[0])
        if int(bits[w]) != named:
            raise CollectiveMismatch(
                f"warp {g.low + w} executes it with lanes {int(bits[w]):#010x}, its member mask is {named:#010x}"
            )


def _mask_source(program: Any, operand: Any) -> Any:
    """None for the full mask, else a function that gives the row of the member mask."""
    if isinstance(operand, Imm) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return lambda g: None
    return source(program, operand, "u32")


def _lane_source(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """Which lane each lane reads, and whether that is in range (PTX ISA, shfl.sync: pseudo-code of the operation)."""
    bound = c & 31
    segment = (c >> 8) & 31
    top = (lane & segment) | (bound & ~segment)
    low = lane & segment
    if mode == "up":
        j = lane - b
        return np.where(j >= top, j, lane), j >= top
    if mode == "down":
        j = lane + b
    elif mode == "bfly":
        j = lane ^ b
    else:
        j = low | (b & ~segment)
    return np.where(j <= top, j, lane), j <= top


@effect("shfl.sync.idx.b32", "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32")
def shuffle(instr: Instr, program: Any) -> Handler:
    mode = instr.parts[2]
    dest, value, b, c, members = instr.args
    pred: Operand | None = None
    if isinstance(dest, Pair):
        pred, dest = dest.second, dest.first
    out = None if isinstance(dest, Discard) else target(dest, "u32")
    flag = target(pred, "p") if isinstance(pred, Reg) else None
    src, mask_of = source(program, value, "u32"), _mask_source(program, members)
    fixed = None
    if isinstance(b, Imm) and isinstance(c, Imm):
        fixed = _lane_source(mode, LANE, np.full(32, b.value), np.full(32, c.value))
    b_of, c_of = source(program, b, "u32"), source(program, c, "u32")

    def run(g: Any, m: Any) -> None:
        _members(g, m, mask_of(g))
        if fixed is not None:
            frm, ok = fixed
            moved = src(g).reshape(-1, 32)[:, frm].reshape(-1)
            good: Any = np.tile(ok, len(g.warps)) if flag is not None else None
        else:
            lane = np.tile(LANE, len(g.warps))
            frm, good = _lane_source(mode, lane, b_of(g).astype(np.int64), c_of(g).astype(np.int64))
            moved = src(g)[(np.arange(g.lanes) & ~31) | frm]
        if out is not None:
            np.copyto(out(g), moved, where=m)
        if flag is not None:
            np.copyto(flag(g), good, where=m)

    return run


@effect("elect.sync")
def elect(instr: Instr, program: Any) -> Handler:
    dest = instr.args[0]
    if not isinstance(dest, Pair):
        raise UnknownInstruction(f"elect.sync takes d|p; {instr.where()}")
    out = target(dest.first, "u32") if isinstance(dest.first, Reg) else None
    flag = target(dest.second, "p")
    mask_of = _mask_source(program, instr.args[1])

    def run(g: Any, m: Any) -> None:
        _members(g, m, mask_of(g))
        active = _active(g, m)
        leader = active.argmax(1)
        chosen = (leader[:, None] == LANE) & active
        np.copyto(flag(g), chosen.reshape(-1), where=m)
        if out is not None:
            np.copyto(out(g), np.repeat(leader, 32).astype(np.uint32), where=m)

    return run


@effect("vote.sync.all.pred", "vote.sync.any.pred", "vote.sync.uni.pred", "vote.sync.ballot.b32")
def vote(instr: Instr, program: Any) -> Handler:
    kind = instr.parts[2]
    src, mask_of = source(program, instr.args[1], "p"), _mask_source(program, instr.args[2])
    out = target(instr.args[0], "u32" if kind == "ballot" else "p")

    def run(g: Any, m: Any) -> None:
        _members(g, m, mask_of(g))
        active = _active(g, m)
        value = src(g).reshape(-1, 32)
        yes = value & active
        result: Array
        if kind == "ballot":
            result = _as_bits(yes)
        elif kind == "any":
            result = yes.any(1)
        elif kind == "all":
            result = (value | ~active).all(1)
        else:
            result = (value | ~active).all(1) | (~value | ~active).all(1)
        np.copyto(out(g), np.repeat(result, 32), where=m)

    return run


_REDUCE: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                           "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


@effect(*(f"redux.sync.{o}.{t}" for o in _REDUCE for t in ("u32", "s32", "b32")))
def redux(instr: Instr, program: Any) -> Handler:
    view = {"b32": "u32"}.get(instr.parts[3], instr.parts[3])
    fold = _REDUCE[instr.parts[2]]
    src, mask_of, out = (
        source(program, instr.args[1], view),
        _mask_source(program, instr.args[2]),
        target(instr.args[0], view),
    )

    def run(g: Any, m: Any) -> None:
        _members(g, m, mask_of(g))
        active = _active(g, m)
        rows = src(g).reshape(-1, 32)
        result = [fold.reduce(r[a]) if a.any() else r[0] for r, a in zip(rows, active, strict=True)]
        np.copyto(out(g), np.repeat(np.array(result, rows.dtype), 32), where=m)

    return run


@effect("activemask.b32")
def activemask(instr: Instr, program: Any) -> Handler:
    out = target(instr.args[0], "u32")

    def run(g: Any, m: Any) -> None:
        np.copyto(out(g), np.repeat(_as_bits(_active(g, m)), 32), where=m)

    return run


@effect("bar.warp.sync")
def warp_sync(instr: Instr, program: Any) -> Handler:
    mask_of = _mask_source(program, instr.args[0])

    def run(g: Any, m: Any) -> None:
        _members(g, m, mask_of(g))

    return run
