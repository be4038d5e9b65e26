"""Rows between ranks, by torch.distributed alone: uneven all-to-all and all-gather, waited for when they are needed.

What a rank that failed or left does to the others is a named error within the group's time-out, never a silent hang.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import errors

T = TypeVar("T")


class Ranks:
    """The ranks that share a sequence: a process group, its size and this process's place in it."""

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.backend = str(dist.get_backend(group))
        self.timeout = None if timeout is None else datetime.timedelta(seconds=timeout)
        self.moved_bytes = 0  # that this rank received so far, counted

    @property
    def device_type(self) -> str:
        """Where tensors lie that this group moves."""
        return "cuda" if "nccl" in self.backend and "gloo" not in self.backend else "any"

    def check_device(self, device: torch.device) -> None:
        """Raises `WrongDeviceForGroup` for tensors that the group can't move."""
        if self.device_type == "cuda" and device.type != "cuda":
            raise errors.WrongDeviceForGroup(
                f"q lies on {device}, and NCCL moves tensors of GPUs alone; move q, k and v to this rank's GPU, or "
                'make the mesh with a gloo group: init_device_mesh("cpu", ...)'
            )
        if device.type == "cuda" and self.backend == "gloo":
            raise errors.WrongDeviceForGroup(
                f'q lies on {device}, and the group is gloo; make the mesh with init_device_mesh("cuda", ...), whose '
                "group is NCCL"
            )

    def exchange(self, sends: Sequence[Sequence[torch.Tensor]], into: Sequence[Sequence[torch.Tensor]]) -> PendingRows:
        """An uneven all-to-all: of each rank the tensors that go to it, and memory for those that come from it.

        All of them are one group of sends and receives, each from where it lies to where it belongs, with no copy
        between unless a tensor sent is not contiguous.
        """
        steps: list[dist.P2POp] = []
        sent = [[t.contiguous() for t in each] for each in sends]
        for mine, own in zip(into[self.rank], sent[self.rank], strict=True):
            mine.copy_(own)
        for rank in (r for r in range(self.size) if r != self.rank):
            steps += self._steps(dist.isend, sent[rank], rank) + self._steps(dist.irecv, into[rank], rank)
            self.moved_bytes += sum(t.numel() * t.element_size() for t in into[rank])
        works = self.named(lambda: dist.batch_isend_irecv(steps)) if steps else []
        return PendingRows(self, works, [t for each in sent for t in each])

    def _steps(self, way: Any, tensors: Sequence[torch.Tensor], rank: int) -> list[dist.P2POp]:
        """Each of these to a rank, or from it."""
        other = dist.get_global_rank(self.group, rank)
        return [dist.P2POp(way, t, other, self.group) for t in tensors if t.numel()]

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, PendingRows]:
        """Memory for `rows` of every rank, one after the other."""
        found = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        self.moved_bytes += (self.size - 1) * rows.numel() * rows.element_size()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        sent = rows.contiguous()
        work = self.named(lambda: gather(found, sent, group=self.group, async_op=True))
        return found, PendingRows(self, [work], [sent])

    def total(self, numbers: torch.Tensor, kind: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum, or another reduction, of the tensors of all ranks, in place."""
        self.wait(self.named(lambda: dist.all_reduce(numbers, kind, group=self.group, async_op=True)))
        return numbers

    def said_by_all(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64 (n,) of each rank as (ranks, n); waits for all of them, for at most the time-out."""
        where = torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else numbers.device
        mine = numbers.to(where)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.named(lambda: dist.all_gather(found, mine, group=self.group, async_op=True))
        self.wait(work)
        return torch.stack(found).cpu()

    def wait(self, work: Any) -> None:
        """Until `work` is done, for at most the time-out; without one, on GPUs streams wait, and the host goes on."""
        self.named(lambda: work.wait() if self.timeout is None else work.wait(self.timeout))

    def named(self, step: Callable[[], T]) -> T:
        """What `step` gives. Raises: `RankUnreachable` for what torch.distributed raises."""
        try:
            return step()
        except errors.ComposattnError:
            raise
        except (RuntimeError, ValueError) as failed:
            first = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
            raise errors.RankUnreachable(
                f"rank {self.rank} of {self.size} could not exchange rows with the others ({first}); one of "
                "them failed, left, or computes something else: its own error says why"
            ) from failed


class PendingRows:
    """Rows on their way, of which what is sent is held until they are there."""

    def __init__(self, ranks: Ranks, works: Sequence[Any], held: Sequence[torch.Tensor]) -> None:
        self._ranks, self._works, self._held = ranks, works, held

    def arrived(self) -> None:
        """Waits until they are there."""
        for work in self._works:
            self._ranks.wait(work)
        self._works, self._held = (), ()
