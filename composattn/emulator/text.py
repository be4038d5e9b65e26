"""The PTX of a kernel, with no machine code: the emulator reads none, and ptxas takes a third of the time."""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_LOCK = threading.Lock()  # the hook below is process-wide


def compile_ptx(function: Any, arguments: Sequence[Any], arch: str = "sm_90a", switches: str = "") -> str:
    """The kernel's PTX; `switches` are options of the language's sequence of passes.

    Every compilation writes into a folder of its own: equal argument types give equal names.
    """
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts

    with tempfile.TemporaryDirectory() as folder, no_machine_code():
        options = cute.KeepPTX(True), DumpDir(folder), cute.GPUArch(arch), ExtraCompilerOpts(switches)
        cute.compile[options](function, *arguments, no_jit_engine=True)
        (path,) = Path(folder).glob("*.ptx")
        return path.read_text()


@contextlib.contextmanager
def no_machine_code() -> Iterator[None]:
    """Inside, what this thread compiles ends as PTX."""
    from cutlass.base_dsl.compiler import Compiler

    whole, mine = Compiler.compile, threading.get_ident()

    def compile_to_text(self: Any, module: Any, pipeline: str, *given: Any, **named: Any) -> Any:
        if threading.get_ident() == mine:
            pipeline = to_text(pipeline, str(self.passmanager.PassManager.parse(pipeline)))
        return whole(self, module, pipeline, *given, **named)

    with _LOCK:
        Compiler.compile = compile_to_text
        try:
            yield
        finally:
            Compiler.compile = whole


def to_text(pipeline: str, passes: str) -> str:
    """The pipeline that consists of `passes`, made to embed PTX in the host code. One of another form stays as it is.

    Passes of before the kernel's are known by the name of their sequence alone, so that is stopped at LLVM's dialect,
    and what follows there is told one by one. That the kernel is to become machine code is an attribute of it by then.
    """
    sequence = re.fullmatch(r"\s*builtin\.module\((cute-to-nvvm\{)(.*\})\)\s*", pipeline, re.DOTALL)
    target = re.search(r"gpu\.module\(cuda-compute-target\{[^}]*\bsass\b[^}]*\}\)", passes)
    embedding = passes.find("cuda-to-binary{")
    if sequence is None or target is None or embedding < 0:
        return pipeline
    as_ptx = re.sub(r"\bsass\b", "ptx", target[0])
    return f"builtin.module({sequence[1]}llvm-only=true {sequence[2]},{as_ptx},{passes[embedding:]}"
