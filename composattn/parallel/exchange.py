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

    def exchange(
        self, send: torch.Tensor, sends: Sequence[int], receives: Sequence[int], into: torch.Tensor | None = None
    ) -> Pending:
        """`send` cut by rows among the ranks, against as many from each of them; `into`: memory for what comes."""
        found = send.new_empty((sum(receives), *send.shape[1:])) if into is None else into
        self.moved_bytes += (sum(receives) - receives[self.rank]) * _row_bytes(send)

        def start() -> Any:
            return dist.all_to_all_single(
                found, send.contiguous(), list(receives), list(sends), group=self.group, async_op=True
            )

        return Pending(self, self.named(start), found, send)

    def gather(self, rows: torch.Tensor) -> Pending:
        """`rows` of every rank, one after the other."""
        found = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        self.moved_bytes += (self.size - 1) * rows.shape[0] * _row_bytes(rows)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        work = self.named(lambda: gather(found, rows.contiguous(), group=self.group, async_op=True))
        return Pending(self, work, found, rows)

    def total(self, numbers: torch.Tensor, kind: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum, or another reduction, of the tensors of all ranks, in place."""
        self.wait(self.named(lambda: dist.all_reduce(numbers, kind, group=self.group, async_op=True)), numbers)
        return numbers

    def said_by_all(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64 (n,) of each rank as (ranks, n); waits for all of them, for at most the time-out."""
        where = torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else numbers.device
        mine = numbers.to(where)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        work = self.named(lambda: dist.all_gather(found, mine, group=self.group, async_op=True))
        self.named(lambda: work.wait() if self.timeout is None else work.wait(self.timeout))
        return torch.stack(found).cpu()

    def wait(self, work: Any, moved: torch.Tensor) -> None:
        """Until `work` is done; on GPUs streams wait by themselves, and the time-out is that of the group."""
        in_time = self.timeout is not None and moved.device.type != "cuda"
        self.named(lambda: work.wait(self.timeout) if in_time else work.wait())

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


class Pending:
    """Rows on their way."""

    def __init__(self, ranks: Ranks, work: Any, rows: torch.Tensor, held: torch.Tensor) -> None:
        self._ranks, self._work, self._rows, self._held = ranks, work, rows, held

    def arrived(self) -> torch.Tensor:
        """The rows, when they are there."""
        if self._work is not None:
            self._ranks.wait(self._work, self._rows)
            self._work = None
            self._held = self._rows
        return self._rows


def _row_bytes(t: torch.Tensor) -> int:
    return t.element_size() * (t.numel() // t.shape[0] if t.shape[0] else int(torch.Size(t.shape[1:]).numel()))
