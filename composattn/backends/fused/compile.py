"""Plan → compiled kernel, cached in memory and on disk by content; and compiling with no GPU, for inspection.

A compiled kernel is a function of torch tensors (through TVM FFI) that launches on torch's current stream. It is kept
by the hash of everything that went into it: the plan (graphs by content, never by source text), the target and the
`toolchain`; see `disk_cache` for where.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailable
from . import disk_cache, toolchain
from .plan import CombinePlan, ForwardPlan

Launchable = Callable[..., Any]
Plan = ForwardPlan | CombinePlan
_SYMBOL = "composattn_kernel"
_OPTIONS = "--enable-tvm-ffi"

_compiled: dict[str, Launchable] = {}
_lock = threading.Lock()


def compile_plan(plan: Plan) -> Launchable:
    """The kernel of `plan`, from memory, else from disk, else compiled now (2 to 4 seconds)."""
    key = content_hash(plan)
    found = _compiled.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _compiled:
            folder = disk_cache.usable()
            _compiled[key] = _from_disk(folder, key) or _keep(_run_compiler(plan, _OPTIONS), folder, key)
    return _compiled[key]


def content_hash(plan: Plan) -> str:
    """What a kernel is kept by: the hash of all that decides its code."""
    return hashlib.sha256(f"{plan.key}\n{_OPTIONS}\n{toolchain.described(plan.target.arch)}".encode()).hexdigest()[:32]


def _cute(plan: Plan) -> Any:
    """The DSL, told which GPU to compile for."""
    # read when the DSL is imported; a machine without a GPU has no other way to say it
    os.environ.setdefault("CUTE_DSL_ARCH", plan.target.arch)
    try:
        return importlib.import_module("cutlass.cute")
    except ImportError as missing:
        raise BackendUnavailable(
            f'backend="{plan.backend}" generates kernels with nvidia-cutlass-dsl, which is not installed; '
            'pip install "composattn[gpu]", or use backend="streaming"'
        ) from missing


def _run_compiler(plan: Plan, options: str) -> Any:
    cute = _cute(plan)
    backend = importlib.import_module(f"composattn.backends.{plan.backend}.{plan.module}")
    function, arguments = backend.kernel(plan)
    # what runs is loaded from the file that is kept: to link it in memory first costs 0.1 to 0.4 s
    return cute.compile(function, *arguments, no_jit_engine=True, options=f"{options} --gpu-arch {plan.target.arch}")


# --- on disk ------------------------------------------------------------------------------------------------
#
# A kernel is kept as a shared library, which TVM FFI loads without the kernel language (0.02 s; importing that takes
# 0.5 to 1 s). Where no linker is found, or the folder takes no libraries (mounted noexec), as an object file.


def _from_disk(folder: Path, key: str) -> Launchable | None:
    for suffix, load in _LOADERS.items():
        path = disk_cache.get(folder, key, suffix)
        if path is None:
            continue
        try:
            return load(path)
        except Exception as broken:  # an unreadable cache must cost time, not correctness
            warnings.warn(f"compiling again: {path} can't be loaded ({broken})", stacklevel=4)
            disk_cache.drop(path)
    return None


def _load_library(path: Path) -> Launchable:
    import tvm_ffi

    return tvm_ffi.load_module(str(path)).get_function(_SYMBOL)  # type: ignore[no-any-return]


def _load_object(path: Path) -> Launchable:
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(path), enable_tvm_ffi=True), _SYMBOL)  # type: ignore[no-any-return]


_LOADERS = {".so": _load_library, ".o": _load_object}


def _keep(compiled: Any, folder: Path, key: str) -> Launchable:
    """Puts a kernel on disk and loads it from there, without what was traced and the tensors that it holds."""
    try:
        with tempfile.TemporaryDirectory(prefix="composattn-") as aside:
            made = Path(aside) / "kernel.o"
            compiled.export_to_c(str(made), _SYMBOL)
            library = _linked(made)
            if library is not None:
                kept = disk_cache.put(folder, key, ".so", library.read_bytes())
                try:
                    return _load_library(kept)
                except Exception:  # no libraries from this folder: an object file is loaded by the kernel language
                    disk_cache.drop(kept)
            return _load_object(disk_cache.put(folder, key, ".o", made.read_bytes()))
    except OSError as full:
        raise BackendUnavailable(
            f"a compiled kernel can be written nowhere, not even among temporary files ({full}); make room, or set "
            "TMPDIR to a writable folder"
        ) from full


def _linked(made: Path) -> Path | None:
    """The object file as a shared library that finds what it needs by itself; None where there is no linker."""
    linker = shutil.which("ld")
    if linker is None:
        return None
    from cutlass.cute.runtime import find_runtime_libraries

    needed = find_runtime_libraries(enable_tvm_ffi=True)
    places = [f"-rpath={Path(library).parent}" for library in needed]
    library = made.with_suffix(".so")
    # all symbols resolved now, so that what is missing fails here and not at a launch
    command = [
        linker,
        "-shared",
        "-Bsymbolic",
        "-z",
        "defs",
        "-z",
        "now",
        *places,
        "-o",
        str(library),
        str(made),
        *needed,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        warnings.warn(f"{linker} failed, kernels load slower: {done.stderr.strip()[:500]}", stacklevel=5)
        return None
    return library


# --- with no GPU ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Artifact:
    """What the compiler made of a plan, kept in a folder of its own, and what it costs.

    `registers` are those at launch (roles then trade them), `stack` bytes of local memory, both None where cuobjdump is
    not installed; `shared_memory` bytes a block; `instructions` the machine code in order, empty without nvdisasm.
    """

    plan: Plan
    ptx_path: Path
    cubin_path: Path
    entry: str
    threads: int
    shared_memory: int
    registers: int | None
    stack: int | None
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def mnemonics(self) -> Counter[str]:
        """How often each machine instruction occurs."""
        return Counter(i.name for i in self.instructions)

    @property
    def spills(self) -> int | None:
        """Instructions that move registers to local memory and back; None where nvdisasm is not installed."""
        return self.mnemonics["STL"] + self.mnemonics["LDL"] if self.instructions else None

    def inner_loops(self, count: int) -> list[Counter[str]]:
        """Mnemonics of the `count` shortest loops that multiply matrices, in program order.

        A loop ends before the last product of all, which stands after it; code that waits out of line, at the very
        end, jumps back too.
        """
        found: list[tuple[int, int]] = []
        multiply = [n for n, i in enumerate(self.instructions) if i.name in ("HGMMA", "UTCHMMA")]
        last = multiply[-1] if multiply else 0
        spans = [
            (i.target, n) for n, i in enumerate(self.instructions) if i.target is not None and i.target <= n < last
        ]
        for start, stop in sorted(spans, key=lambda span: span[1] - span[0]):
            apart = all(stop < a or start > b for a, b in found)
            if len(found) < count and apart and any(start <= n <= stop for n in multiply):
                found.append((start, stop))
        return [Counter(i.name for i in self.instructions[a : b + 1]) for a, b in sorted(found)]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A machine instruction: its name with no suffix, for a branch the number of the one it jumps to, and its text."""

    name: str
    target: int | None
    text: str


def compile_offline(plan: Plan, folder: Path | None = None) -> Artifact:
    """Compiles `plan` with no GPU and keeps PTX and cubin, by default under the cache folder, by content."""
    folder = folder or disk_cache.usable() / "offline"
    key = content_hash(plan)
    ptx, cubin = (disk_cache.get(folder, key, suffix) for suffix in (".ptx", ".cubin"))
    if ptx is None or cubin is None:
        with tempfile.TemporaryDirectory(prefix="composattn-") as aside:
            _run_compiler(plan, f"{_OPTIONS} --keep-ptx --keep-cubin --dump-dir={aside}")
            ptx, cubin = (
                disk_cache.put(folder, key, suffix, _only(aside, f"*{suffix}").read_bytes())
                for suffix in (".ptx", ".cubin")
            )
    text = ptx.read_text()
    registers, stack = _resources(cubin)
    return Artifact(
        plan,
        ptx,
        cubin,
        entry=_find(r"\.entry\s+([\w$]+)", text, str),
        threads=_find(r"\.(?:reqntid|maxntid)\s+(\d+)", text, int),
        shared_memory=plan.shared_memory,
        registers=registers,
        stack=stack,
        instructions=_instructions(cubin),
    )


def _only(folder: str, pattern: str) -> Path:
    (path,) = Path(folder).glob(pattern)
    return path


def _find(pattern: str, text: str, kind: Callable[[str], Any]) -> Any:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the PTX has no {pattern}")
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


def _resources(cubin: Path) -> tuple[int | None, int | None]:
    tool = _binary_tool("cuobjdump")
    if tool is None:
        return None, None
    text = subprocess.run([tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    usage = text.stdout + text.stderr
    return _find(r"REG:(\d+)", usage, int), _find(r"STACK:(\d+)", usage, int)


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_JUMP = re.compile(r"\((\.L_x_\d+)\)")


def _instructions(cubin: Path) -> tuple[Instruction, ...]:
    tool = _binary_tool("nvdisasm")
    if tool is None:
        return ()
    text = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    rows: list[tuple[str, str | None, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, found = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            labels[label.group(1)] = len(rows)
        elif found:
            jump = _JUMP.search(found.group(2)) if found.group(1) == "BRA" else None
            rows.append((found.group(1), jump.group(1) if jump else None, found.group(1) + found.group(2)))
    return tuple(Instruction(name, labels.get(jump) if jump else None, text) for name, jump, text in rows)
