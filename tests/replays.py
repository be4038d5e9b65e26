"""CUDA graphs with no GPU: operations on CPU tensors are recorded as a graph would record them, and run again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host_work import read_of
from composattn.analysis import streams
from composattn.backends.fused.running import captured

_HOST = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "unique")
STREAM = 7


class Replay(TorchDispatchMode):
    """A graph: what is dispatched inside, and launched by `launch`, runs again on the same memory by calling it.

    Raises `AssertionError` for what the host reads, which no graph can record; `looks`: in a run before one records.
    """

    now: Replay | None = None

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.steps: list[Callable[[], object]] = []
        self.made: list[weakref.ref[Any]] = []  # storages of its pool
        self.held: list[Any] = []
        self.constant: set[int] = set()  # storages that hang on no tensor: the host may know what they hold

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        if func is torch.ops.aten.lift_fresh.default:  # what torch.tensor makes of the host's numbers
            self.constant |= given
        of_contents = not given <= self.constant
        assert self.looks or not (of_contents and func.__name__.split(".")[0] in _HOST), f"{func} waits for the device"
        found = func(*args, **kwargs)
        own = [t for t in _tensors(found) if t.untyped_storage()._cdata not in given]
        if not of_contents:
            self.constant |= {t.untyped_storage()._cdata for t in own}
        self.held += own
        self.made += [weakref.ref(t.untyped_storage()) for t in own]
        if (own or func._schema.is_mutable) and "empty" not in func.__name__:
            self.steps.append(lambda: self._run(func, args, kwargs, found, bool(own)))
        return found

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any, found: Any, has_own: bool) -> None:
        again = func(*args, **kwargs)
        for old, new in zip(_tensors(found), _tensors(again), strict=True) if has_own else ():
            if old is not new:
                old.copy_(new)

    def __call__(self) -> None:
        for step in self.steps:
            step()

    def let_go(self) -> list[Any]:
        """Storages of its pool that somebody else holds."""
        self.steps.clear()
        self.held.clear()
        gc.collect()
        return [storage for made in self.made if (storage := made()) is not None]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor))


def integers(arguments: Any) -> list[torch.Tensor]:
    """Tensors of whole numbers: captured ones, tables, lengths."""
    return [t for t in _tensors(arguments) if not t.is_floating_point()]


class Launched:
    """Stands for a compiled kernel; `given`: copies of what each launch read, by kernels in their order."""

    given: ClassVar[list[list[torch.Tensor]]] = []

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __call__(self, *arguments: Any) -> None:
        given = read_of(self.plan, arguments)
        self._read(given)
        if Replay.now is not None:
            Replay.now.steps.append(lambda: self._read(given))

    @classmethod
    def _read(cls, arguments: Any) -> None:
        cls.given.append([t.clone() for t in integers(arguments)])


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    """Inside, a graph records; as on a GPU, but that everything also runs."""
    graph = Replay()
    with monkeypatch.context() as now:
        now.setattr(streams, "is_capturing", lambda: True)
        now.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
        now.setattr(Replay, "now", graph)
        with graph:
            yield graph


@pytest.fixture
def gpu_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that stand from call to call ask for the stream, as on a GPU."""
    monkeypatch.setattr(captured, "has_streams", lambda device: True)
    monkeypatch.setattr(captured, "device_number", lambda device: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
