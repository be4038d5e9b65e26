"""Loads, stores and atomics on global, shared, parameter and generic addresses; ldmatrix, stmatrix; address casts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from composattn.emulator.findings import Misaligned, MissingGridWait, OutOfBounds, SharedRace, UnknownInstruction
from composattn.emulator.memory import RANK, UINT, misaligned, span
from composattn.emulator.opcodes.alu import pack_halves
from composattn.emulator.opcodes.alu_row import DTYPES, WIDTH
from composattn.emulator.opcodes.floats import bf16_to_f32, f32_to_bf16
from composattn.emulator.opcodes.registry import Handler, address, effect, pick, source, target, words_of
from composattn.emulator.ptx import Discard, Imm, Instr, Mem, Reg, Sym, Vec
from composattn.emulator.symbols import PARAM_WINDOW, SHARED_WINDOW

Array = np.ndarray[Any, Any]
_ORDER = {"relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "cluster", "sys", "volatile", "weak", "nc", "ca",
          "cg", "cs", "lu", "cv", "wb", "wt", "L1::no_allocate", "L1::evict_last", "L1::evict_first",
          "L1::evict_normal", "L1::evict_unchanged", "L2::cache_hint", "L2::128B", "L2::64B", "L2::256B", "v2", "v4",
          "v8", "mmio"}  # fmt: skip


# --- shared memory -----------------------------------------------------------------------------------------


def resolve_block(g: Any, addresses: Array) -> tuple[Any, Array]:
    """The block that shared addresses lie in (the cluster's window holds every block's memory) and their offsets."""
    low, high = span(addresses)
    rank = low >> RANK
    if rank not in g.block.cluster.ranks or high >> RANK != rank:
        raise OutOfBounds(f"shared address {int(addresses[0]):#x} is in no block of the cluster")
    return g.block.cluster.blocks[rank], addresses & ((1 << RANK) - 1)


def own_offset(g: Any, address: int) -> int:
    """Where an address lies in the block's own shared memory."""
    block, local = resolve_block(g, np.array([address]))
    if block is not g.block:
        raise OutOfBounds(f"shared address {address:#x} is that of another block of the cluster")
    return int(local[0])


def _check_shared(block: Any, addresses: Array, nbytes: int) -> None:
    bad = misaligned(addresses, nbytes)
    if bad is not None:
        raise Misaligned(f"shared address {bad:#x} for an access of {nbytes} bytes")
    low, high = span(addresses)
    block.shared.check(low, high + nbytes)


def _shared_words(g: Any, addresses: Array, nbytes: int) -> tuple[Any, Array, Array]:
    """The shared memory that accesses go to, where in it they begin, and their words."""
    block, addresses = resolve_block(g, addresses)
    _check_shared(block, addresses, nbytes)
    return block.shared, addresses, (addresses // 4)[:, None] + np.arange((nbytes + 3) // 4)


def _by_agent(g: Any, lanes: Array) -> list[tuple[int, slice]]:
    """Each warp's agent and where its lanes stand among `lanes`, which ascend."""
    warps = g.lane_warp[lanes]
    first = g.block.first_agent
    if warps[0] == warps[-1]:
        return [(first + int(warps[0]), slice(None))]
    ends = [0, *(np.flatnonzero(np.diff(warps)) + 1).tolist(), len(warps)]
    return [(first + int(warps[a]), slice(a, b)) for a, b in itertools.pairwise(ends)]


def shared_load(g: Any, lanes: Array, addresses: Array, size: int, count: int) -> Array:
    """[lanes, count] values; every word must have been written, and its write be known to the reading warp."""
    memory, addresses, words = _shared_words(g, addresses, size * count)
    known = g.block.cluster.known
    for agent, its in _by_agent(g, lanes):
        mine = words[its]
        memory.order_read(mine, known[agent])
        memory.stamp_read(mine, agent, int(known[agent, agent]))
    return memory.views[size][(addresses // size)[:, None] + np.arange(count)]


def shared_store(g: Any, lanes: Array, addresses: Array, size: int, values: Array) -> None:
    count = values.shape[1]
    memory, addresses, words = _shared_words(g, addresses, size * count)
    known = g.block.cluster.known
    for agent, its in _by_agent(g, lanes):
        mine = words[its]
        if size >= 4:  # warps may share a word by halves
            memory.order_write(mine, known[agent])
        memory.write(mine, agent, known[agent, agent], True)
    if size >= 4 and (memory.writer[words] != g.agents(lanes)[:, None]).any():
        raise SharedRace("two warps write the same shared memory in the same step")
    memory.views[size][(addresses // size)[:, None] + np.arange(count)] = values


# --- global memory -----------------------------------------------------------------------------------------


def check_finished(g: Any, warps: Any, low: int, high: int) -> None:
    """Raises if warps that have not waited for the kernel before use what it writes, in [low, high)."""
    cluster = g.block.cluster
    for start, end in g.block.launch.beyond:
        if low < end and start < high:
            raise MissingGridWait(
                f"{g.block.launch.memory.describe(low)}, is written by a kernel that the one before has not waited for"
            )
    for start, end in g.block.launch.unfinished:
        if low < end and start < high and not cluster.known[g.block.first_agent + warps, cluster.grid_agent].all():
            raise MissingGridWait(
                f"{g.block.launch.memory.describe(low)}, is written by the kernel before, which need not be over: no "
                "griddepcontrol.wait comes before this"
            )


def _check_finished(g: Any, m: Any, addresses: Array, nbytes: int) -> None:
    if g.block.launch.unfinished or g.block.launch.beyond:
        warps = np.array(g.active_warps(m))
        check_finished(g, warps, int(addresses.min()), int(addresses.max()) + nbytes)


# --- by address space --------------------------------------------------------------------------------------


def _load(g: Any, m: Any, space: str, addresses: Array, size: int, count: int) -> Array:
    if space == "global":
        _check_finished(g, m, addresses, size * count)
        return g.block.launch.memory.load(addresses.astype(np.uint64), size, count)
    if space == "shared":
        return shared_load(g, g.active(m), addresses, size, count)
    if space == "param":
        at = addresses - PARAM_WINDOW
        data = _parameters(g, int(at.min()), int(at.max()) + size * count)
        return data[at[:, None] + np.arange(size * count)].view(UINT[size])
    return _load(g, m, *_generic(addresses), size, count)


def _parameters(g: Any, start: int, end: int) -> Array:
    """The bytes of the parameters up to `end`. Raises unless [start, end) lies in them."""
    data: Array = g.block.launch.param_bytes
    if start < 0 or end > data.size:
        raise OutOfBounds(f"parameter offset {start}..{end} of {data.size}")
    return data[:end]


def _store(g: Any, m: Any, space: str, addresses: Array, size: int, values: Array) -> None:
    if space == "global":
        _check_finished(g, m, addresses, size * values.shape[1])
        g.block.launch.memory.store(addresses.astype(np.uint64), size, values)
        g.block.cluster.progress += 1
    elif space == "shared":
        shared_store(g, g.active(m), addresses, size, values)
    else:
        _store(g, m, *_generic(addresses), size, values)


def _generic(addresses: Array) -> tuple[str, Array]:
    """The space that generic addresses of all lanes lie in."""
    low, high = span(addresses)
    if low >= PARAM_WINDOW and high < PARAM_WINDOW + (1 << 20):
        return "param", addresses
    if low >= SHARED_WINDOW and high < SHARED_WINDOW + (1 << 32):
        return "shared", addresses - SHARED_WINDOW
    return "global", addresses


def _space(parts: list[str]) -> str:
    for p in parts:
        if p in ("global", "param"):
            return p
        if p in ("shared", "shared::cta", "shared::cluster"):
            return "shared"
    return "generic"


_SPACES = {"global", "param", "shared", "shared::cta", "shared::cluster"}


def _items(operand: Any) -> tuple[Any, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


@effect("ld", "ldu")
def load(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"ld", "ldu", *_SPACES, *_ORDER, *DTYPES}, instr)
    type_ = instr.parts[-1]
    space, size = _space(instr.parts), WIDTH[type_]
    dests = _items(instr.args[0])
    at = address(program, instr.args[1])
    signed = np.dtype(DTYPES[type_]).kind == "i"
    rows = [None if isinstance(d, Discard) else _wide_target(d, signed) for d in dests]
    dtype = DTYPES[type_] if signed else UINT[size]
    parameter = _offset_of_parameter(program, instr.args[1]) if space == "param" else None
    counts = space == "global" and "acquire" in instr.parts and size == 4

    def run(g: Any, m: Any) -> None:
        if parameter is not None:  # one value for all lanes: a kernel begins with some fifty of these
            values = _parameters(g, parameter, parameter + size * len(dests))[parameter:].view(UINT[size])[None]
        else:
            values = _load(g, m, space, at(g, m), size, len(dests))
        if counts:
            g.block.launch.memory.check_counts(at(g, m), values)
        if signed:
            values = values.view(dtype)
        for i, row in enumerate(rows):
            if row is not None:
                _put(row(g), values[:, i], m)

    return run


def _offset_of_parameter(program: Any, operand: Any) -> int | None:
    """Where among the parameters an operand lies that names one; None where a register holds its address."""
    if not isinstance(operand, Mem) or not isinstance(operand.base, Sym):
        return None
    return int(program.address(operand.base.name)) + operand.offset - PARAM_WINDOW


def _wide_target(dest: Any, signed: bool) -> Any:
    if not isinstance(dest, Reg) or dest.bank not in ("16", "32", "64"):
        raise UnknownInstruction(f"a load into {dest}")
    return target(dest, ("s" if signed else "u") + dest.bank)


def _put(row: Array, values: Array, m: Any) -> None:
    if m is True:
        row[...] = values
    else:
        row[m] = values


@effect("st")
def store(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"st", *_SPACES, *_ORDER, *DTYPES}, instr)
    type_ = instr.parts[-1]
    space, size = _space(instr.parts), WIDTH[type_]
    at = address(program, instr.args[0])
    rows = []
    for item in _items(instr.args[1]):
        bank = item.bank if isinstance(item, Reg) else {1: "16", 2: "16", 4: "32", 8: "64"}[size]
        rows.append(source(program, item, "u" + bank))
    dtype = UINT[size]

    def run(g: Any, m: Any) -> None:
        values = np.stack([pick(r(g), m).astype(dtype) for r in rows], 1)
        _store(g, m, space, at(g, m), size, values)

    return run


# --- atomics -----------------------------------------------------------------------------------------------


def _packed_add(kind: str) -> Any:
    def halves(x: Array) -> tuple[Array, Array]:
        low, high = (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)
        if kind == "bf16":
            return bf16_to_f32(low), bf16_to_f32(high)
        return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)

    def run(old: Array, new: Array) -> Array:
        (a, b), (c, d) = halves(old), halves(new)
        return pack_halves(a + c, b + d, kind)

    return run


_ATOMIC: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "inc": lambda old, top: np.where(old >= top, 0, old + 1).astype(old.dtype),
    "dec": lambda old, top: np.where((old == 0) | (old > top), top, old - 1).astype(old.dtype),
}  # fmt: skip


def _fold(op: str, packed: str | None) -> Any:
    return _packed_add(packed) if packed and op == "add" else _ATOMIC.get(op)


@effect("atom", "red")
def atomic(instr: Instr, program: Any) -> Handler:
    head = instr.parts[0]
    words = {head, *_SPACES, *_ORDER, *DTYPES, *_ATOMIC, "cas", "noftz", "f16x2", "bf16x2"}
    words_of(program, instr.op, words, instr)
    op = next(p for p in instr.parts if p in _ATOMIC or p == "cas")
    type_ = instr.parts[-1]
    packed = {"bf16x2": "bf16", "f16x2": "f16"}.get(type_)
    base = "u32" if packed else {"b32": "u32", "b64": "u64"}.get(type_, type_)
    size, space = WIDTH[base], _space(instr.parts)
    args = list(instr.args)
    dest = args.pop(0) if head == "atom" else Discard()
    at = address(program, args.pop(0))
    out = None if isinstance(dest, Discard) else target(dest, base)
    count = len(_items(args[0]))
    values = [source(program, v, base) for v in _items(args[0])]
    other = source(program, args[1], base) if op == "cas" else None
    if out is not None and count > 1:
        raise UnknownInstruction(f"a vector atomic with a result; {instr.where()}")
    fold = _fold(op, packed)
    add_at = np.add if op == "add" and not packed else None
    dtype = DTYPES[base]
    counts = op in ("add", "inc", "dec") and not packed and base in ("u32", "s32")

    def run(g: Any, m: Any) -> None:
        addresses = at(g, m)
        where, addresses = _generic(addresses) if space == "generic" else (space, addresses)
        operands = np.stack([pick(v(g), m) for v in values], 1)
        if where == "global":
            _check_finished(g, m, addresses, size * count)
        view, index = _atomic_view(g, where, addresses, size, count)
        typed = view.view(dtype)
        if counts and where == "global":
            g.block.launch.memory.check_counts(addresses, typed[index])
        g.block.cluster.progress += 1
        if out is None and add_at is not None:
            np.add.at(typed, index, operands)
            return
        compare = pick(other(g), m) if other is not None else None
        olds = np.empty(len(addresses), dtype)
        for lane in range(len(addresses)):  # one lane after the other, as if in this order
            old = typed[index[lane]].copy()
            new = operands[lane]
            if compare is not None:
                typed[index[lane]] = np.where(old == new, compare[lane], old)
            else:
                typed[index[lane]] = fold(old, new)
            olds[lane] = old[0]
        if out is not None:
            _put(out(g), olds, m)

    return run


def _atomic_view(g: Any, space: str, addresses: Array, size: int, count: int) -> tuple[Array, Array]:
    if space == "shared":
        block, addresses = resolve_block(g, addresses)
        _check_shared(block, addresses, size)
        return block.shared.views[size], (addresses // size)[:, None] + np.arange(count)
    found = g.block.launch.memory.locate(addresses.astype(np.uint64), size * count)
    if found is None:
        raise UnknownInstruction("one atomic instruction on several tensors")
    allocation, offset = found
    allocation.written = True
    view = allocation.view(size)
    if view is None:
        raise Misaligned(f"atomic on {allocation.name}, whose address is no multiple of {size}")
    return view, offset[:, None] // size + np.arange(count)


# --- 8 x 8 matrices ----------------------------------------------------------------------------------------


@effect("stmatrix.sync.aligned.m8n8", "ldmatrix.sync.aligned.m8n8")
def matrix(instr: Instr, program: Any) -> Handler:
    """Lane i of matrix j's group gives the address of row i; a lane holds two neighbouring elements of row lane / 4."""
    storing = instr.parts[0] == "stmatrix"
    words_of(program, instr.op, {"stmatrix", "ldmatrix", "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared",
                                 "shared::cta", "b16"}, instr)  # fmt: skip
    trans = "trans" in instr.parts
    mem, vec = (instr.args[0], instr.args[1]) if storing else (instr.args[1], instr.args[0])
    items = _items(vec)
    n = len(items)
    at = address(program, mem)
    sources = [source(program, i, "u32") for i in items] if storing else []
    targets = [] if storing else [target(i, "u32") for i in items]
    lane = np.arange(32)
    # Element pairs of a lane: (row, column) in the matrix of 8 x 8 halves.
    row, col = lane // 4, lane % 4 * 2

    def run(g: Any, m: Any) -> None:
        if m is not True:
            raise UnknownInstruction(f"{instr.parts[0]} under divergence; {instr.where()}")
        addresses = at(g, True).reshape(-1, 32)[:, : 8 * n]  # [warp, row addresses]
        warps = addresses.shape[0]
        flat = addresses.reshape(-1)
        lanes = (np.arange(warps)[:, None] * 32 + np.arange(8 * n)).reshape(-1)
        if storing:
            tile = np.empty((warps, n, 8, 8), np.uint16)
            for j, s in enumerate(sources):
                value = s(g).reshape(warps, 32)
                low, high = (value & np.uint32(0xFFFF)).astype(np.uint16), (value >> np.uint32(16)).astype(np.uint16)
                if trans:
                    tile[:, j, col, row], tile[:, j, col + 1, row] = low, high
                else:
                    tile[:, j, row, col], tile[:, j, row, col + 1] = low, high
            _check_rows(flat)
            shared_store(g, lanes, flat, 8, tile.reshape(-1, 8).view(np.uint64))
            return
        _check_rows(flat)
        rows = shared_load(g, lanes, flat, 8, 2).view(np.uint16).reshape(warps, n, 8, 8)
        for j, t in enumerate(targets):
            if trans:
                low, high = rows[:, j, col, row], rows[:, j, col + 1, row]
            else:
                low, high = rows[:, j, row, col], rows[:, j, row, col + 1]
            t(g)[...] = (low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))).reshape(-1)

    return run


def _check_rows(addresses: Array) -> None:
    bad = misaligned(addresses, 16)
    if bad is not None:
        raise Misaligned(f"shared address {bad:#x} for a matrix row of 16 bytes")


# --- address casts -----------------------------------------------------------------------------------------


@effect("cvta")
def cast(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"cvta", "to", *_SPACES, "u64", "u32"}, instr)
    space, back = _space(instr.parts), "to" in instr.parts
    delta = SHARED_WINDOW if space == "shared" else 0
    dest, src = instr.args
    if not isinstance(dest, Reg):
        raise UnknownInstruction(f"cvta into {dest}; {instr.where()}")
    out, view = target(dest, "u" + dest.bank), "u" + dest.bank
    value = source(program, src, view if isinstance(src, Imm) or not isinstance(src, Reg) else "u" + src.bank)
    dtype = np.dtype(UINT[int(dest.bank) // 8])

    def run(g: Any, m: Any) -> None:
        moved = value(g).astype(np.int64) + (-delta if back else delta)
        np.copyto(out(g), moved.astype(np.uint64).astype(dtype), where=m)

    return run


@effect("mapa")
def mapa(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"mapa", "shared::cluster", "u32", "u64"}, instr)
    if "shared::cluster" not in instr.parts:
        raise UnknownInstruction(f"mapa of a generic address; {instr.where()}")
    view = instr.parts[-1]
    out, src, rank = (
        target(instr.args[0], view),
        source(program, instr.args[1], view),
        source(program, instr.args[2], "u32"),
    )

    def run(g: Any, m: Any) -> None:
        value = (src(g).astype(np.int64) & ((1 << RANK) - 1)) | (rank(g).astype(np.int64) << RANK)
        np.copyto(out(g), value.astype(out(g).dtype), where=m)

    return run


@effect("prefetch", "prefetchu", "discard", "applypriority")
def nothing(instr: Instr, program: Any) -> Handler:
    """Hints that change no value."""
    return lambda g, m: None


__all__ = ["f32_to_bf16", "resolve_block", "shared_load", "shared_store"]
