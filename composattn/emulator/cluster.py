"""Blocks that run together, the scheduler of their gangs, and the asynchronous operations they started."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from composattn.emulator.agents import Agents
from composattn.emulator.barriers import NamedBarrier
from composattn.emulator.block import ThreadBlock
from composattn.emulator.findings import AsyncAtExit, Deadlock, Finding, TensorAllocation
from composattn.emulator.gang import EXIT, NOWHERE, Gang, Meeting, Path
from composattn.emulator.ledger import Unordered
from composattn.emulator.mode import Mode
from composattn.emulator.program import PtxProgram
from composattn.emulator.request import Launch
from composattn.emulator.waits import PendingCopy, Wait

SPIN = 1_000  # nodes a gang may run without blocking before the others get a turn
IDLE = 2_000  # nodes a cluster may run with no barrier, copy or global store before other clusters get a turn


class Cluster(Agents):
    """All blocks of one cluster and everything that happens in it."""

    def __init__(self, program: PtxProgram, launch: Launch, origin: tuple[int, int, int], mode: Mode) -> None:
        super().__init__(program, launch, mode)
        cx, cy, _ = launch.cluster
        threads = int(np.prod(launch.block))
        self.barrier = NamedBarrier("cluster", self.agents)
        self.pending: list[PendingCopy] = []
        self.random = random.Random(mode.seed)
        self.progress = 0
        self.idle = 0  # nodes since then
        self.blocks = [
            ThreadBlock(self, r, (origin[0] + r % cx, origin[1] + r // cx % cy, origin[2] + r // (cx * cy)))
            for r in self.ranks
        ]  # fmt: skip
        for block in self.blocks:
            block.pair = self.blocks[block.rank & ~1 : (block.rank & ~1) + 2]
        self.gangs: list[Gang] = []
        self.finished: list[Gang] = []
        step = mode.warps_together
        for block in self.blocks:
            for low in range(0, block.warps, step):
                high = min(low + step, block.warps)
                mask: Any = True
                if high * 32 > threads:
                    mask = np.arange(low * 32, high * 32) < threads
                self.gangs.append(Gang(block, low, high, [Path(0, mask, NOWHERE)]))

    # --- names for messages --------------------------------------------------------------------------------

    def agent_name(self, agent: int) -> str:
        for block in self.blocks:
            if block.first_agent <= agent < block.first_agent + block.warps:
                return f"warp {agent - block.first_agent} of block {block.index}"
            for i, unit in enumerate(block.units):
                if unit.agent == agent:
                    return f"wgmma of warps {4 * i}-{4 * i + 3} of block {block.index}"
            for w, units in enumerate(block.tensor_units):
                if units.agent <= agent < units.agent + 3:
                    return f"tcgen05.{('mma', 'ld', 'st')[agent - units.agent]} of warp {w} of block {block.index}"
            for w, bulk in enumerate(block.bulk):
                if bulk.agent == agent:
                    return f"a bulk store of warp {w} of block {block.index}"
            for w, copies in enumerate(block.async_copies):
                if copies.agent == agent:
                    return f"a cp.async of warp {w} of block {block.index}"
            for bar in block.mbarriers.values():
                if bar.agent == agent:
                    return f"a copy that completes on mbarrier {bar.name} of block {block.index}"
        return f"agent {agent}"

    # --- asynchronous operations ---------------------------------------------------------------------------

    def start(self, op: PendingCopy) -> None:
        """A copy begins; when it completes is the mode's choice."""
        if self.mode.late:
            self.pending.append(op)
        else:
            self.complete(op)

    def complete(self, op: PendingCopy) -> None:
        self.progress += 1
        try:
            op.run()
        except Finding as e:
            raise type(e)(str(e), op.what) from None

    def _complete_one(self) -> None:
        if self.mode.seed is not None:
            op = self.pending.pop(self.random.randrange(len(self.pending)))
        else:
            op = self.pending.pop()
        self.complete(op)

    # --- the scheduler -------------------------------------------------------------------------------------

    @property
    def spins(self) -> bool:
        """Whether all that can run only spin: other blocks may have to go on."""
        return self.idle > IDLE

    def _go_on(self) -> None:
        """After it only spun: others have had their turn."""
        self.idle = 0
        if self.pending:  # it may be what they spin for
            self._complete_one()

    def _wake(self, gave_up_at: tuple[int, int]) -> tuple[int, int]:
        """Does what gangs that all wait can hope for, and gives when they last gave up waiting."""
        if self.pending:
            self._complete_one()
            return gave_up_at
        # gangs whose warps wait for different barriers part as they give up, perhaps again at the next ones
        now = self.progress, len(self.gangs)
        if now <= gave_up_at or not self._give_up():
            self._deadlock()
        return now

    def run(self, steps: float = math.inf) -> bool:
        """True when all gangs are done, False when it only spins, or has taken so many steps."""
        if self.spins:
            self._go_on()
        gave_up_at = -1, 0
        while self.gangs:
            steps -= 1
            if steps < 0:
                return False
            ready = [g for g in self.gangs if g.wait is None or g.wait.ready()]
            if self.mode.seed is not None and self.pending and self.random.random() < 0.2:
                self._complete_one()
                continue
            if not ready:
                gave_up_at = self._wake(gave_up_at)
                continue
            if self.mode.seed is not None:
                ready = [self.random.choice(ready)]
            before = self.progress
            for gang in ready:
                gang.wait = None
                self.idle += self._advance(gang, self._budget())
            if self.progress != before:
                self.idle = 0
            if self.spins:
                return False
        self._at_exit()
        return True

    def _budget(self) -> int:
        return SPIN if self.mode.seed is None else self.random.choice((1, 2, 5, 20, 100))

    def _give_up(self) -> bool:
        """Lets one try_wait return "not yet"; False if nobody waits in one."""
        waiting = [g for g in self.gangs if g.wait is not None and g.wait.may_give_up]
        for gang in waiting:
            gang.gave_up = True
            gang.wait = None
        return bool(waiting)

    def _deadlock(self) -> None:
        lines = []
        for g in self.gangs:
            node = self.program.nodes[g.stack[-1].node]
            at = node.code[0].where() if node.code else "?"
            lines.append(f"{g} waits for {g.wait.what() if g.wait else 'nothing'}\n      at {at}")
        for block in self.blocks:
            lines += [f"block {block.index} {b}" for b in block.named.values() if b.arrived]
        raise Deadlock(f"no warp can go on ({self.mode} mode):\n    " + "\n    ".join(lines))

    def _at_exit(self) -> None:
        while self.pending:
            self._complete_one()
        for block in self.blocks:
            for w, bulk in enumerate(block.bulk):
                left = [o for group in bulk.groups for o in group] + bulk.open
                if bulk.open or bulk.read < bulk.committed:
                    raise AsyncAtExit(
                        f"block {block.index} warp {w} exits and never waited until its bulk stores had read shared "
                        f"memory (cp.async.bulk.commit_group, wait_group.read)", left[-1].where
                    )  # fmt: skip
                for op in left:
                    op.write()
            for i, unit in enumerate(block.units):
                if unit.open or unit.groups:
                    raise AsyncAtExit(f"block {block.index} warps {4 * i}-{4 * i + 3} exit with a wgmma not waited for")
            self._tensor_at_exit(block)
            self.program.free(block.file)

    def _tensor_at_exit(self, block: ThreadBlock) -> None:
        for w, units in enumerate(block.tensor_units):
            if units.open:
                raise AsyncAtExit(
                    f"block {block.index} warp {w} exits with {len(units.open)} tcgen05.mma not committed"
                )
            if units.issued > int(self.known[:, units.agent].max()):
                raise AsyncAtExit(
                    f"block {block.index} warp {w} exits with a tcgen05.mma whose commit nobody waited for"
                )
        if block.tensor_in_use:
            raise TensorAllocation(f"block {block.index} exits with tensor memory allocated: {block.tensor_in_use}")

    # --- one gang ------------------------------------------------------------------------------------------

    def _advance(self, g: Gang, budget: int) -> int:
        """Runs a gang until it blocks, splits or ends. Returns its budget if it used that up, else 0."""
        whole = budget
        nodes = self.program.nodes
        runs = self.program.runs
        visits = g.visits
        rests = self.mode.seed is None
        try:
            while budget:
                budget -= 1
                if not g.stack:
                    self._finish(g)
                    return 0
                path = g.stack[-1]
                n = path.node
                if n == path.meet:
                    g.stack.pop()
                    continue
                if g.meeting is not None and n == g.meeting.node and path.mask is True:
                    self._meet(g, g.meeting)
                    return 0
                if n == EXIT:
                    g.remove(path.mask)
                    continue
                node = nodes[n]
                mask = path.mask
                if node.sync:
                    if not self._stands_alone(g, path, node):
                        return 0
                    continue
                visits[n] += 1
                run = runs[n]
                if run is not None:
                    run(g, mask)
                if node.branch is None:
                    path.node = node.fall
                elif self._branch(g, node, path):
                    return 0
                if node.rests and rests and (node.taken != n or path.node == n):
                    return whole  # it would only ask again till the turn of the others
            return whole
        except Unordered as e:
            race = e.ledger.race(e, self.agent_name(e.agent))
            raise type(race)(str(race), f"{g}, {self.program.place(n, g.at)}") from None
        except Finding as e:
            if e.place:
                raise
            raise type(e)(str(e), f"{g}, {self.program.place(n, g.at)}") from None

    def _stands_alone(self, g: Gang, path: Path, node: Any) -> bool:
        """Runs an instruction that may wait for others. False if it does, or if warps part before or behind it."""
        parts = path.mask is not True and len(g.warps) > 1
        if not parts:
            wait = self.program.runs[node.index](g, path.mask)  # type: ignore[misc]  # it always has a function
            if wait is not None:
                g.wait = wait
                return False
            g.visits[node.index] += 1
            path.node = node.fall
            parts = len(g.warps) > self.mode.warps_together
        if parts:
            self._split(g, [(w, w + 1) for w in g.warps])
        return not parts

    def _finish(self, g: Gang) -> None:
        g.done = True
        self.gangs.remove(g)
        self.finished.append(g)
        self.progress += 1

    def _branch(self, g: Gang, node: Any, path: Path) -> bool:
        """Moves `path` on; True if the gang was split."""
        b = node.branch
        target = EXIT if node.taken == EXIT or not b.target else node.taken
        if b.guard is None:
            path.node = target
            return False
        pred = g.views["p"][b.guard.index]
        take = ~pred if b.negate else pred
        mask = path.mask
        if mask is not True:
            take = take & mask
        count = int(np.count_nonzero(take))
        if count == 0:
            path.node = node.fall
            return False
        if count == (g.lanes if mask is True else int(np.count_nonzero(mask))):
            path.node = target
            return False
        if mask is True and len(g.warps) > 1 and self._splits(g, node, target, take):
            return True
        stay = ~take if mask is True else mask & ~take
        taken = take.copy()
        path.node = meet = node.meet
        if meet == EXIT:
            g.stack.pop()
            meet = NOWHERE
        g.stack += Path(node.fall, stay, meet), Path(target, taken, meet)
        return False

    def _splits(self, g: Gang, node: Any, target: int, take: Any) -> bool:
        """Splits a gang whose warps branch each as a whole; False where one does not."""
        per = take.reshape(-1, 32)
        some, every = per.any(1), per.all(1)
        if (some != every).any():
            return False
        parts = _runs(every, g.low)
        meeting = Meeting(node.meet, len(parts), g.meeting) if node.short else None
        self._split(g, parts, target, node.fall, every, meeting)
        return True

    def _split(self, g: Gang, parts: list[tuple[int, int]], target: int = 0, fall: int = 0, takes: Any = None,
               meeting: Meeting | None = None) -> None:  # fmt: skip
        new = []
        for low, high in parts:
            gang = g.part(low, high)
            gang.meeting = meeting or gang.meeting
            if takes is not None:
                gang.stack[-1].node = target if takes[low - g.low] else fall
            new.append(gang)
        at = self.gangs.index(g)
        self.gangs[at : at + 1] = new
        g.done = True
        self.finished.append(g)  # keeps the count of what its warps did together

    def _meet(self, g: Gang, meeting: Meeting) -> None:
        """A part has come to the meeting: the last to come makes them one gang again."""
        meeting.come.append(g)
        g.wait = Wait(lambda: False, lambda: "the warps that it parted from at a branch")
        if len(meeting.come) == meeting.parts:
            self.merge(meeting.come).meeting = meeting.outer

    def merge(self, gangs: list[Gang]) -> Gang:
        """Neighbouring gangs that stand at the same node with all lanes go on as one."""
        gangs = sorted(gangs, key=lambda g: g.low)
        first = gangs[0]
        whole = Gang(first.block, first.low, gangs[-1].high, [Path(first.stack[-1].node, True, NOWHERE)])
        whole.in_flight = any(g.in_flight for g in gangs)
        whole.unfenced = 0
        for g in gangs:
            whole.unfenced |= g.unfenced
            whole.copy(tuple((to, origin) for to, origin in g.copies.items() if whole.copies.get(to) != origin))
        at = self.gangs.index(first)
        for g in gangs:
            g.done = True
            self.gangs.remove(g)
            self.finished.append(g)
        self.gangs.insert(at, whole)
        return whole


def _runs(every: Any, low: int) -> list[tuple[int, int]]:
    """Maximal runs of neighbouring warps that go the same way."""
    out, start = [], 0
    for i in range(1, len(every) + 1):
        if i == len(every) or every[i] != every[start]:
            out.append((low + start, low + i))
            start = i
    return out
