"""What decides a kernel's machine code besides its plan, as text: sources, versions, processor, environment.

The text is part of the key of each compiled kernel. What it leaves out, the disk cache would serve from before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[3]
# These run and judge kernels; nothing that makes one imports them.
NOT_COMPILED = ("emulator", "testing")
# Code, and the tables that choose tiles and registers.
SUFFIXES = (".py", ".json")
COMPILERS = {"nvidia-cutlass-dsl-libs-cu12": 12, "nvidia-cutlass-dsl-libs-cu13": 13}  # by CUDA version
# What compiles, and what its compiled kernels link to.
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", *COMPILERS)


def described(arch: str) -> str:
    """The toolchain as it is now, for kernels of the GPU architecture `arch`."""
    return f"{_of_process()}\n{environment(arch)}"


@functools.cache
def _of_process() -> str:
    return f"{versions()}\n{source_hash()}\n{processor()}"


def sources(package: Path = PACKAGE) -> list[Path]:
    """The files of the package that compiling may reach: all but those of `NOT_COMPILED`.

    Kernels are traced from graphs, and graph code (derivatives) runs while they are; telling apart
    what can change a kernel is worth less than the seconds of compiling once more after an upgrade.
    """
    files = (p for suffix in SUFFIXES for p in package.rglob(f"*{suffix}"))
    return sorted(p for p in files if p.relative_to(package).parts[0] not in NOT_COMPILED)


def source_hash(package: Path = PACKAGE) -> str:
    found = hashlib.sha256()
    for path in sources(package):
        text = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


def versions() -> str:
    """Versions of Python, torch (which folds constants) and the kernel language, its place, and its compiler."""
    language = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = list(language.submodule_search_locations or ()) if language else []
    return (
        f"python {platform.python_version()}, torch {torch.__version__}, {dict(_installed())} in {places}, {compiler()}"
    )


def _installed() -> Iterator[tuple[str, str | None]]:
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, None


def compiler() -> str:
    """Which compiler the kernel language takes: the newest that the driver knows, with no driver the newest there is.

    So kernels that are compiled where there is no GPU are those that the same environment looks for where there is one.
    """
    installed, known = dict(_installed()), _driver()
    able = (version for package, version in COMPILERS.items() if installed[package] and version <= (known or version))
    return f"compiler of CUDA {max(able, default=None)}"


def _driver() -> int | None:
    """The CUDA version that the driver knows; None with no driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def processor() -> str:
    """Kind and instruction sets of this host: launch code is compiled for them (AVX-512 where there is any)."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = platform.processor()
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    # of the first processor; the lines of the others repeat it, and clocks differ at each look
    lines = [line for line in told.partition("\n\n")[0].splitlines() if line.startswith(kept)]
    return f"{platform.machine()} {hashlib.sha256(' '.join(lines or [told]).encode()).hexdigest()}"


def environment(arch: str) -> str:
    """What the kernel language reads: every CUTE_DSL_ variable; its ARCH is `arch` where the user names none."""
    read = {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")}
    return str(sorted({"CUTE_DSL_ARCH": arch, **read}.items()))
