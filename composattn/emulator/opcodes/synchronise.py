"""mbarriers, numbered barriers, fences, register reallocation, dependent launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from composattn.emulator.barriers import Knowledge, MBarrier, NamedBarrier
from composattn.emulator.findings import (
    BarrierMisuse,
    CollectiveMismatch,
    Misaligned,
    RegistersExhausted,
    UnknownInstruction,
)
from composattn.emulator.opcodes.access import own_offset, resolve_block
from composattn.emulator.opcodes.registry import (
    Handler,
    address,
    effect,
    literal,
    pick,
    source,
    sync,
    target,
    words_of,
)
from composattn.emulator.ptx import Discard, Instr, Mem, Pair, Reg
from composattn.emulator.waits import Wait, together

Array = np.ndarray[Any, Any]
_SCOPES = {"shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster"}


def who(g: Any, warp: int) -> str:
    return f"warp {warp} of block {g.block.index}"


def barrier_at(g: Any, addr: int, warp: int) -> tuple[Any, MBarrier]:
    """(the block that owns it, the barrier) at a shared address, as the warp may use it."""
    if addr % 8:
        raise Misaligned(f"mbarrier address {addr:#x}")
    block, local = resolve_block(g, np.array([addr]))
    return block, block.mbarrier(int(local[0]), g.block.knowledge(warp))


# --- mbarrier ----------------------------------------------------------------------------------------------


@effect("mbarrier.init")
def init(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"mbarrier", "init", *_SCOPES}, instr)
    at, count = address(program, instr.args[0]), source(program, instr.args[1], "u32")

    def run(g: Any, m: Any) -> None:
        block = g.block
        lanes = g.active(m)
        for addr, n, lane in zip(at(g, m).tolist(), pick(count(g), m).tolist(), lanes.tolist(), strict=True):
            warp = int(g.lane_warp[lane])
            if addr % 8:
                raise Misaligned(f"mbarrier address {addr:#x}")
            addr = own_offset(g, addr)
            block.shared.check(addr, addr + 8)
            old = block.mbarriers.get(addr)
            if old is not None and old.in_use:
                raise BarrierMisuse(f"{old} is initialised again while in use")
            agent = old.agent if old is not None else block.cluster.new_barrier_agent()
            bar = MBarrier(f"{addr:#x}", n, agent, block.cluster.agents)
            knowledge = block.knowledge(warp)
            me = block.first_agent + warp
            bar.initialised = (me, int(knowledge.all[me]))
            block.mbarriers[addr] = bar
            block.shared.hold(addr, knowledge.all)
        for warp in g.active_warps(m):
            block.tick(warp)
        block.cluster.progress += 1

    return run


@effect("mbarrier.inval")
def invalidate(instr: Instr, program: Any) -> Handler:
    at = address(program, instr.args[0])

    def run(g: Any, m: Any) -> None:
        for addr, lane in zip(at(g, m).tolist(), g.active(m).tolist(), strict=True):
            block, bar = barrier_at(g, addr, int(g.lane_warp[lane]))
            if bar.in_use:
                raise BarrierMisuse(f"{bar} is invalidated while in use")
            local = own_offset(g, addr)
            del block.mbarriers[local]
            block.shared.forget(local)

    return run


@effect("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(instr: Instr, program: Any) -> Handler:
    parts = instr.parts
    words_of(program, instr.op, {"mbarrier", "arrive", "expect_tx", "noComplete", *_SCOPES}, instr)
    expects, relaxed = "expect_tx" in parts, "relaxed" in parts
    args = list(instr.args)
    dest = args.pop(0) if not isinstance(args[0], Mem) else Discard()
    at = address(program, args.pop(0))
    value = source(program, args[0], "u32") if args else None
    out = target(dest, "u64") if isinstance(dest, Reg) else None

    def run(g: Any, m: Any) -> None:
        addresses = at(g, m)
        lanes = g.active(m)
        amounts = pick(value(g), m) if value is not None else np.ones(len(lanes), np.int64)
        warps = g.lane_warp[lanes]
        tokens = np.zeros(len(lanes), np.uint64)
        for addr in np.unique(addresses).tolist():
            here = addresses == addr
            for warp in np.unique(warps[here]).tolist():
                mine = here & (warps == warp)
                _, bar = barrier_at(g, addr, warp)
                tokens[mine] = bar.phase
                total = int(amounts[mine].sum())
                if expects:
                    bar.expect(total)
                    total = int(mine.sum())
                bar.arrive(total, g.block.knowledge(warp).offered(relaxed), who(g, warp))
        for warp in g.active_warps(m):
            g.block.tick(warp)
        g.block.cluster.progress += 1
        if out is not None:
            row = out(g)
            row[lanes] = tokens

    return run


@effect("mbarrier.expect_tx")
def expect(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"mbarrier", "expect_tx", *_SCOPES}, instr)
    at, value = address(program, instr.args[0]), source(program, instr.args[1], "u32")

    def run(g: Any, m: Any) -> None:
        for addr, n, lane in zip(at(g, m).tolist(), pick(value(g), m).tolist(), g.active(m).tolist(), strict=True):
            barrier_at(g, addr, int(g.lane_warp[lane]))[1].expect(n)
        g.block.cluster.progress += 1

    return run


@sync("mbarrier.try_wait", "mbarrier.test_wait")
def wait(instr: Instr, program: Any) -> Handler:
    """try_wait stands still until the phase is over; where nothing else can go on it gives up, as on a time-out."""
    words_of(program, instr.op, {"mbarrier", "try_wait", "test_wait", "parity", *_SCOPES} - {"relaxed"}, instr)
    testing = "test_wait" in instr.parts
    by_parity = "parity" in instr.parts
    dest = instr.args[0]
    out = target(dest, "p")
    at = address(program, instr.args[1])
    phase = source(program, instr.args[2], "u32" if by_parity else "u64")

    def run(g: Any, m: Any) -> Wait | None:
        addresses, values = at(g, m), pick(phase(g), m)
        lanes = g.active(m)
        warps = g.lane_warp[lanes]
        asked = list(zip(addresses.tolist(), values.tolist(), strict=True))  # of each lane
        of_warps = sorted({(*pair, warp) for pair, warp in zip(asked, warps.tolist(), strict=True)})
        pairs = {(addr, value): barrier_at(g, addr, warp)[1] for addr, value, warp in of_warps}

        def over(bar: MBarrier, value: int) -> bool:
            return bar.parity_done(value & 1) if by_parity else bar.phase > value

        if not (testing or g.gave_up) and not all(over(b, v) for (_, v), b in pairs.items()):
            return Wait(lambda: all(over(b, v) for (_, v), b in pairs.items()), lambda: _describe(pairs), True)
        g.gave_up = False
        done = {(addr, value): over(bar, value) for (addr, value), bar in pairs.items()}
        out(g)[lanes] = [done[pair] for pair in asked]
        for addr, value, warp in of_warps:
            if done[addr, value]:
                g.block.knowledge(warp).join(pairs[addr, value].released)
        return None

    return run


def _describe(pairs: dict[tuple[int, int], MBarrier]) -> str:
    return "; ".join(f"the end of the phase of parity {v} of {b}" for (_, v), b in pairs.items())


# --- numbered barriers -------------------------------------------------------------------------------------


def _barrier_operands(instr: Instr, program: Any) -> tuple[Any, Any]:
    args = instr.args
    number = source(program, args[0], "u32")
    return number, source(program, args[1], "u32") if len(args) > 1 else None


def _by_barrier(g: Any, m: Any, number: Array, threads: Array | None) -> list[tuple[NamedBarrier, int, list[int]]]:
    """(barrier, threads that it is used with, warps) of each barrier that warps of the gang name."""
    warps = g.lane_warp[g.active(m)].tolist()
    counts = [g.block.warps * 32] * len(warps) if threads is None else pick(threads, m).tolist()
    asked = sorted(set(zip(warps, pick(number, m).tolist(), counts, strict=True)))
    if len(asked) > len(set(warps)):
        raise CollectiveMismatch("the barrier, or the number of threads, differs between lanes of a warp")
    out: dict[tuple[int, int], list[int]] = {}
    for warp, barrier, count in asked:
        out.setdefault((barrier, count), []).append(warp)
    return [(g.block.barrier(barrier), count, members) for (barrier, count), members in out.items()]


def _join_barrier(
    g: Any, bar: NamedBarrier, warps: list[int], expected: int, holds: dict[int, bool] | None = None
) -> int:
    """Each warp arrives by itself. The last phase that one of them belongs to: they may go on when it is over.

    `holds`: by warp, whether what is asked there holds for one of its lanes.
    """
    block = g.block
    if expected % 32 or expected <= 0:
        raise CollectiveMismatch(f"{bar} with {expected} threads, no multiple of a warp")
    phase = bar.phase
    for w in warps:
        phase = bar.phase
        bar.arrive(32, expected, block.knowledge(w), f"warp {w}", holds is not None and holds[w])
        block.tick(w)
    block.cluster.progress += 1
    return phase


@effect("bar.arrive", "barrier.arrive", "barrier.cta.arrive")
def arrive_numbered(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"bar", "barrier", "cta", "arrive", "aligned"}, instr)
    number, threads = _barrier_operands(instr, program)

    def run(g: Any, m: Any) -> None:
        for bar, expected, warps in _by_barrier(g, m, number(g), threads(g)):
            _join_barrier(g, bar, warps, expected)

    return run


@sync("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync")
def sync_numbered(instr: Instr, program: Any) -> Handler:
    """Warps of a gang may name barriers of their own: the gang goes on when all are over."""
    words_of(program, instr.op, {"bar", "barrier", "cta", "sync", "aligned"}, instr)
    number, threads = _barrier_operands(instr, program)

    def run(g: Any, m: Any) -> Wait | None:
        if g.ticket is None:
            named = _by_barrier(g, m, number(g), threads(g) if threads else None)
            g.ticket = [(bar, _join_barrier(g, bar, warps, count), warps) for bar, count, warps in named]
        return _leave_barriers(g)

    return run


@sync("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red")
def ask_numbered(instr: Instr, program: Any) -> Handler:
    """A numbered barrier at which all threads learn whether a predicate holds for any of them."""
    words_of(program, instr.op, {"bar", "barrier", "cta", "red", "or", "pred", "aligned"}, instr)
    number, threads = (source(program, arg, "u32") for arg in instr.args[1:3])
    out, asked = target(instr.args[0], "p"), source(program, instr.args[3], "p")

    def run(g: Any, m: Any) -> Wait | None:
        if g.ticket is None:
            named = _by_barrier(g, m, number(g), threads(g))
            lanes, yes = g.lane_warp[g.active(m)], pick(asked(g), m)
            holds = {w: bool(yes[lanes == w].any()) for w in set(lanes.tolist())}
            g.ticket = [(bar, _join_barrier(g, bar, warps, count, holds), warps) for bar, count, warps in named]

        def hear(bar: NamedBarrier, warps: list[int]) -> None:
            np.copyto(out(g), bar.answer, where=np.isin(g.lane_warp, warps))

        return _leave_barriers(g, hear)

    return run


def _leave_barriers(g: Any, hear: Callable[[NamedBarrier, list[int]], None] | None = None) -> Wait | None:
    """A wait until all of the gang's barriers are over, then what each of them leaves with its warps."""
    tickets = g.ticket
    if any(bar.phase <= phase for bar, phase, _ in tickets):
        return Wait(
            lambda: all(bar.phase > phase for bar, phase, _ in tickets),
            lambda: "; ".join(str(bar) for bar, phase, _ in tickets if bar.phase <= phase),
        )
    g.ticket = None
    for bar, _, warps in tickets:
        for w in warps:
            g.block.knowledge(w).join(bar.released)
        if hear is not None:
            hear(bar, warps)
    return None


@effect("barrier.cluster.arrive")
def arrive_cluster(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"barrier", "cluster", "arrive", "release", "relaxed", "aligned"}, instr)
    relaxed = "relaxed" in instr.parts

    def run(g: Any, m: Any) -> None:
        block = g.block
        warps = g.active_warps(m)
        total = block.cluster.warps_per_block * 32 * len(block.cluster.ranks)
        for w in warps:
            block.cluster_tickets[w] = block.cluster.barrier.phase
            block.cluster.barrier.arrive(32, total, block.knowledge(w).offered(relaxed), who(g, w))
            block.tick(w)
        block.cluster.progress += 1

    return run


@sync("barrier.cluster.wait")
def wait_cluster(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"barrier", "cluster", "wait", "acquire", "aligned"}, instr)

    def run(g: Any, m: Any) -> Wait | None:
        block = g.block
        bar = block.cluster.barrier
        tickets = [block.cluster_tickets.get(w) for w in g.active_warps(m)]
        if None in tickets:
            raise BarrierMisuse("barrier.cluster.wait by a warp that has not arrived")
        last = max(t for t in tickets if t is not None)
        if bar.phase <= last:
            return Wait(lambda: bar.phase > last, lambda: str(bar))
        for w in g.active_warps(m):
            block.knowledge(w).join(bar.released)
        return None

    return run


# --- fences ------------------------------------------------------------------------------------------------


def _fence(learn: Callable[[Knowledge, int], Any]) -> Handler:
    """Each warp that executes it learns: `learn(its knowledge, its agent)`."""

    def run(g: Any, m: Any) -> None:
        for w in g.active_warps(m):
            learn(g.block.knowledge(w), g.block.first_agent + w)
            g.block.tick(w)

    return run


@effect("fence.proxy.async")
def fence_async(instr: Instr, program: Any) -> Handler:
    words_of(program, instr.op, {"fence", "proxy", "async", "shared::cta", "shared::cluster", "global"}, instr)
    if "global" in instr.parts:
        return _nothing
    own = "shared::cta" in instr.parts

    def run(g: Any, m: Any) -> None:
        mine = slice(g.block.first_agent, g.block.first_agent + g.block.warps)
        for w in g.active_warps(m):
            k = g.block.knowledge(w)
            far = k.far[mine].copy()
            np.maximum(k.fenced, k.all, out=k.fenced)
            np.maximum(k.far, k.all, out=k.far)
            if own:  # what this block's warps wrote elsewhere is not in its memory
                k.far[mine] = far
            g.block.tick(w)

    return run


@effect("fence.mbarrier_init")
def fence_init(instr: Instr, program: Any) -> Handler:
    """Covers what the warp itself initialised; others learn of it through a barrier."""
    words_of(program, instr.op, {"fence", "mbarrier_init", "release", "cluster"}, instr)

    def learn(k: Knowledge, me: int) -> None:
        k.inits[me] = k.all[me]

    return _fence(learn)


@effect("fence.acq_rel", "fence.sc", "membar")
def fence_memory(instr: Instr, program: Any) -> Handler:
    """Lets relaxed arrivals behind it pass on what came before. One of a block's scope does so for no cluster."""
    return _nothing if "cta" in instr.parts else _fence(lambda k, me: k.release())


@effect("griddepcontrol.wait")
def wait_for_grids(instr: Instr, program: Any) -> Handler:
    def run(g: Any, m: Any) -> None:
        block = g.block
        block.launch.waited = True
        for w in g.active_warps(m):
            block.knowledge(w).all[block.cluster.grid_agent] = 1

    return run


# Memory here is sequentially consistent, and launches run one after the other: these order what is ordered already.
ORDERING = ("fence.acquire", "fence.release", "fence.proxy.alias", "fence.proxy.tensormap::generic",
            "griddepcontrol.launch_dependents", "nanosleep", "pmevent")  # fmt: skip


@effect(*ORDERING)
def order_only(instr: Instr, program: Any) -> Handler:
    return _nothing


def _nothing(g: Any, m: Any) -> None:
    pass


# --- registers ---------------------------------------------------------------------------------------------


@sync("setmaxnreg")
def registers(instr: Instr, program: Any) -> Handler:
    """More registers are waited for until other warps have given up theirs."""
    words_of(program, instr.op, {"setmaxnreg", "inc", "dec", "sync", "aligned", "u32"}, instr)
    count, more = literal(instr.args[0], instr), "inc" in instr.parts
    if count % 8 or not 24 <= count <= 256:
        raise UnknownInstruction(f"setmaxnreg to {count}: a multiple of 8 in 24..256 is taken; {instr.where()}")

    def run(g: Any, m: Any) -> Wait | None:
        wait = together(g, m, instr)
        if wait is not None:
            return wait
        block, have = g.block, g.block.registers[g.low]
        if (count < have) if more else (count > have):
            raise RegistersExhausted(f"setmaxnreg.{instr.parts[1]} to {count} registers by a warp that has {have}")
        others = [w for w in range(block.warps) if w not in g.warps]
        asked = 32 * (count * len(g.warps) + sum(block.registers[w] for w in others if block.asked[w]))
        if asked > block.pool:
            raise RegistersExhausted(f"the block's warps ask for {asked} registers together, it has {block.pool}")

        def fits() -> bool:
            return 32 * (count * len(g.warps) + sum(block.registers[w] for w in others)) <= block.pool

        if not fits():
            return Wait(fits, lambda: f"{count} registers per thread; the block has {block.pool}: {block.registers}")
        for w in g.warps:
            block.registers[w], block.asked[w] = count, True
        block.cluster.progress += 1
        return None

    return run


__all__ = ["Pair", "barrier_at", "who"]
