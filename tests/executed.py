"""Lines of functions that first calls execute, by whose they are: `python -m tests.executed [backend [call ...]]`.

From the mods to the launch: tracing, analysis, planning, and the kernel's own code, which runs where it is compiled. No
GPU is needed: there seems to be one, and the compiled kernel does nothing. A line counts once, however often it runs.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import composattn as ca
from composattn import backends
from composattn.backends.fused.compiling import compile as compiling
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import TARGETS
from composattn.mods import alibi, causal, document, relative_bias, softcap
from tests.rooms import ROOT, House

PACKAGE = str(ROOT / "composattn")
Lines = set[tuple[str, int]]  # module, number


@contextmanager
def compiling_for(backend: str) -> Iterator[None]:
    """Inside, CPU tensors seem to lie on a GPU of the backend; its kernels are compiled, none kept, and do nothing."""
    (major, minor), target = next(row for row in TARGETS.items() if row[1].backend == backend)
    facts = SimpleNamespace(name=target.gpu, major=major, minor=minor, multi_processor_count=target.sms)
    there = dataclasses.replace(backends.BACKENDS[backend], unavailable=lambda device: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        patch.setitem(backends.BACKENDS, backend, there)
        patch.setattr(compiling, "_from_disk", lambda folder, key: None)
        patch.setattr(compiling, "_keep", lambda compiled, folder, key: lambda *given: None)
        patch.setattr(compiling, "_compiled", {})
        yield


def executed_by(work: Callable[[], object]) -> Lines:
    """Lines in functions of the package that run while `work` does; bodies of modules and classes run when imported."""
    found: Lines = set()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return line if code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def plain(backend: str) -> None:
    ca.attention(rows(1, 8, 512, 128), rows(1, 8, 512, 128), rows(1, 8, 512, 128), backend=backend)


def alibi_causal(backend: str) -> None:
    q, k, v = rows(1, 8, 512, 128), rows(1, 2, 512, 128), rows(1, 2, 512, 128)
    ca.attention(q, k, v, score_mod=alibi(8), mask_mod=causal(), return_lse=True, backend=backend)


def packed_documents(backend: str) -> None:
    ends, ids = torch.tensor([0, 500, 1024], dtype=torch.int32), torch.arange(524) // 97
    q, k, v = rows(1024, 8, 128), rows(1024, 2, 128), rows(1024, 2, 128)
    ca.attention(q, k, v, mask_mod=document(ids) & causal(), varlen=ca.Varlen(ends), return_lse=True, backend=backend)


def paged_parts(backend: str) -> None:
    pages = ca.Paged(torch.zeros(2, 64, dtype=torch.int32), 64, torch.tensor([4000, 3], dtype=torch.int32))
    q, k, v = rows(2, 8, 1, 128), rows(64, 2, 64, 128), rows(64, 2, 64, 128)
    parts = ca.Schedule(split_kv=4)
    ca.attention(q, k, v, score_mod=softcap(20.0), paged=pages, schedule=parts, return_lse=True, backend=backend)


def blocks_with_bias(backend: str) -> None:
    blocks = ca.BlockSparse.topk(torch.zeros(1, 1, 8, 2, dtype=torch.int32), 64, 512, 512)
    bias = relative_bias(torch.zeros(8, 257))
    q, k, v = rows(1, 8, 512, 64), rows(1, 8, 512, 64), rows(1, 8, 512, 64)
    ca.attention(q, k, v, score_mod=bias, mask_mod=blocks, backend=backend)


CALLS = {call.__name__: call for call in (plain, alibi_causal, packed_documents, paged_parts, blocks_with_bias)}


def first_calls(backend: str, *names: str) -> Lines:
    """Lines that these calls run one after the other; what they cache for each other runs once and is among them."""
    with compiling_for(backend), torch.no_grad():
        return executed_by(lambda: [CALLS[name](backend) for name in names])


def by_room(lines: Lines) -> Counter[str]:
    """How many there are of each room."""
    files = {str(Path(PACKAGE).parent / "/".join(m.split("."))): f for m, f in House.at(ROOT).files.items()}
    rooms = {path: file.room for path, file in files.items()}
    return Counter(rooms.get(name.removesuffix(".py").removesuffix("/__init__"), "?") for name, _ in lines)


def shared(lines: Lines) -> float:
    """The share that belongs to no architecture."""
    own = sum(count for room, count in by_room(lines).items() if room.rpartition("/")[2] in ARCHITECTURES)
    return 1 - own / len(lines)


def report(backend: str, *names: str) -> str:
    lines = first_calls(backend, *names)
    rooms = ", ".join(f"{room} {count}" for room, count in by_room(lines).most_common())
    return f"{len(lines)} lines executed, {shared(lines):.1%} of them shared by all architectures: {rooms}"


if __name__ == "__main__":
    backend, *names = sys.argv[1:] or ("blackwell",)
    if names:
        print(f"{', '.join(names)}: {report(backend, *names)}")
    else:  # each in a process of its own, which has seen no other call
        for chosen in (*([name] for name in CALLS), CALLS):
            subprocess.run([sys.executable, "-m", "tests.executed", backend, *chosen], cwd=ROOT, check=True)
