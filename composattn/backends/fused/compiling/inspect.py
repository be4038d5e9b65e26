"""What the compiler made of a plan: its PTX and machine code, read with no GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class Artifact:
    """PTX and machine code of a plan, kept in a folder of their own, and what they cost; read when asked for."""

    plan: Plan
    ptx_path: Path
    cubin_path: Path

    @functools.cached_property
    def ptx(self) -> str:
        return self.ptx_path.read_text()

    @property
    def entry(self) -> str:
        """Name of the kernel."""
        return str(_find(r"\.entry\s+([\w$]+)", self.ptx, str))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(_find(r"\.(?:reqntid|maxntid)\s+(\d+)", self.ptx, int))

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes."""
        return self.plan.shared_memory

    @functools.cached_property
    def _usage(self) -> str | None:
        tool = _binary_tool("cuobjdump")
        if tool is None:
            return None
        done = subprocess.run([tool, "-res-usage", str(self.cubin_path)], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    @property
    def registers(self) -> int | None:
        """At launch (roles then trade them); None where cuobjdump is not installed."""
        return None if self._usage is None else _find(r"REG:(\d+)", self._usage, int)

    @property
    def stack(self) -> int | None:
        """Bytes of local memory; None where cuobjdump is not installed."""
        return None if self._usage is None else _find(r"STACK:(\d+)", self._usage, int)

    @functools.cached_property
    def assembly(self) -> str:
        """The machine code as text; empty where nvdisasm is not installed."""
        return assembly(self.cubin_path)

    @functools.cached_property
    def mnemonics(self) -> Counter[str]:
        """How often each machine instruction occurs."""
        return Counter(_INSTRUCTION.findall(self.assembly))

    @property
    def spills(self) -> int | None:
        """Instructions that move registers to local memory and back; None where nvdisasm is not installed."""
        return self.mnemonics["STL"] + self.mnemonics["LDL"] if self.assembly else None


def _find(pattern: str, text: str, kind: Callable[[str], Any]) -> Any:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return kind(found.group(1))


@functools.cache
def _binary_tool(name: str) -> str | None:
    """cuobjdump or nvdisasm: on the PATH, or from the PyPI packages nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm."""
    on_path = shutil.which(name)
    if on_path:
        return on_path
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == name), None)


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def assembly(cubin: Path) -> str:
    """What nvdisasm says of a cubin; empty where it is not installed."""
    tool = _binary_tool("nvdisasm")
    if tool is None:
        return ""
    # -ndf: no look at where indirect jumps may go, a quarter of its time
    return subprocess.run([tool, "-c", "-ndf", str(cubin)], capture_output=True, text=True, check=True).stdout
