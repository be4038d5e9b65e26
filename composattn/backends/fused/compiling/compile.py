"""Plan → compiled kernel, cached in memory and on disk by content; and compiling with no GPU, to keep or to read.

A compiled kernel is a function of torch tensors (through TVM FFI) that launches on torch's current stream. It is kept
by the hash of everything that went into it: the plan (graphs by content, never by source text), the target and the
`toolchain`; see `disk_cache` for where.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....errors import BackendUnavailable
from ....extras import how_to_install
from ....watched import timed
from ..planning.plan import Plan
from . import disk_cache, toolchain
from .generated import kernel_of
from .inspect import Artifact
from .passes import switches

Launchable = Callable[..., Any]
_SYMBOL = "composattn_kernel"

_compiled: dict[str, Launchable] = {}
_lock = threading.Lock()


def compile_plan(plan: Plan) -> Launchable:
    """The kernel of `plan`, from memory, else from disk, else compiled now (1 to 4 seconds)."""
    key = content_hash(plan)
    found = _compiled.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _compiled:
            folder = disk_cache.usable()
            _compiled[key] = _from_disk(folder, key) or _made(plan, folder, key)
    return _compiled[key]


def _made(plan: Plan, folder: Path, key: str) -> Launchable:
    with timed(plan.title, str(folder)):
        return _keep(_run_compiler(plan), folder, key)


def content_hash(plan: Plan) -> str:
    """What a kernel is kept by: the hash of all that decides its code."""
    decides = f"{plan.key}\n{switches(plan)}\n{toolchain.described(plan.target.arch)}"
    return hashlib.sha256(decides.encode()).hexdigest()[:32]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, garbage is not looked for: all that is imported and traced is in use (0.3 of 2.8 s found nothing).

    Nor behind it, where all of it would be young: it joins the old, among which is looked seldom (0.07 to 0.1 s).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # else somebody has frozen objects, who would find them thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@uncollected()
def _run_compiler(plan: Plan, text: Path | None = None) -> Any:
    """The kernel of `plan`, compiled; PTX and cubin are left in the folder `text`."""
    try:
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts
    except ImportError as missing:
        raise BackendUnavailable(
            f'backend="{plan.target.backend}" generates kernels with nvidia-cutlass-dsl, which is not installed; '
            f'{how_to_install("gpu")}, or use backend="streaming"'
        ) from missing
    function, arguments = kernel_of(plan)
    # what runs is loaded from the file that is kept: to link it in memory first costs 0.1 to 0.4 s
    options = [cute.EnableTVMFFI(True), cute.GPUArch(plan.target.arch), ExtraCompilerOpts(switches(plan))]
    if text is not None:
        options += [cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(str(text))]
    return cute.compile[tuple(options)](function, *arguments, no_jit_engine=True)


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
    options = ["-shared", "-Bsymbolic", "-z", "defs", "-z", "now", *places]
    command = [linker, *options, "-o", str(library), str(made), *needed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        warnings.warn(f"{linker} failed, kernels load slower: {done.stderr.strip()[:500]}", stacklevel=5)
        return None
    return library


# --- with no GPU ----------------------------------------------------------------------------------------------


def compile_offline(plan: Plan, folder: Path | None = None) -> Artifact:
    """Compiles `plan` with no GPU and keeps PTX and cubin, by default under the cache folder, by content."""
    folder = folder or disk_cache.usable() / "offline"
    made = _kept_text(plan, folder)
    if made is None:
        with timed(plan.title, str(folder)):
            _, made = _with_text(plan, folder)
    return made


def compile_ahead(plan: Plan, folder: Path | None = None) -> Artifact:
    """Compiles a plan with or without a GPU, with PTX and cubin beside; `folder`, if not the cache, is one to copy.

    A process whose cache folder it is finds the kernel there, if its `content_hash` of the plan is the same.
    """
    folder = folder or disk_cache.usable()
    key = content_hash(plan)
    made = _kept_text(plan, folder)
    if made is None or _from_disk(folder, key) is None:
        with timed(plan.title, str(folder)):
            compiled, made = _with_text(plan, folder)
            _keep(compiled, folder, key)
    return made


def _kept_text(plan: Plan, folder: Path) -> Artifact | None:
    ptx, cubin = (disk_cache.get(folder, content_hash(plan), suffix) for suffix in (".ptx", ".cubin"))
    return None if ptx is None or cubin is None else Artifact(plan, ptx, cubin)


def _with_text(plan: Plan, folder: Path) -> tuple[Any, Artifact]:
    """`plan` compiled, and its PTX and cubin, kept."""
    with tempfile.TemporaryDirectory(prefix="composattn-") as aside:
        compiled = _run_compiler(plan, Path(aside))
        ptx, cubin = (
            disk_cache.put(folder, content_hash(plan), suffix, _only(aside, f"*{suffix}").read_bytes())
            for suffix in (".ptx", ".cubin")
        )
    return compiled, Artifact(plan, ptx, cubin)


def _only(folder: str, pattern: str) -> Path:
    (path,) = Path(folder).glob(pattern)
    return path
