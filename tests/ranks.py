"""Processes that stand for ranks: started by a server that has torch imported, each with a gloo group of all."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "composattn", "composattn.testing", "tests.parallel_cases"])


class RankFailed(AssertionError):
    """A rank that raised what its test did not expect; the message has its traceback."""


def on_ranks(count: int, work: Callable[..., Any], *given: Any, seconds: float = 120) -> list[Any]:
    """What `work(rank, count, *given)` gives in each of `count` processes.

    Raises: `RankFailed` with the traceback of the first rank that raised, or where a rank did not end in `seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_SERVER.Process(target=_one, args=(r, count, folder, work, given)) for r in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(seconds)
        late = [r for r, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        found = []
        for rank in range(count):
            path = Path(folder) / f"rank-{rank}"
            if not path.exists():
                raise RankFailed(f"rank {rank} said nothing; still running: {late}")
            found.append(pickle.loads(path.read_bytes()))
        for rank, (ok, value) in enumerate(found):
            if not ok:
                raise RankFailed(f"rank {rank}:\n{value}")
        return [value for _, value in found]


def _one(rank: int, count: int, folder: str, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        waits = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=waits)
        found: tuple[bool, Any] = True, work(rank, count, *given)
    except BaseException:
        found = False, traceback.format_exc()
    aside = Path(folder) / f"writing-{rank}"
    aside.write_bytes(pickle.dumps(found))
    aside.rename(Path(folder) / f"rank-{rank}")
