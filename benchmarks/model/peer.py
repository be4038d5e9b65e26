"""flash-attn-4's kernels as machine code, compiled beside ours with no GPU and no driver.

The package is asked as a user asks it, with tensors that have a shape and no memory, in a process of its own: it reads
the target from the environment when it is imported. What a process compiled is kept under the cache folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

from benchmarks.model.clocks import TARGETS
from composattn.backends.fused.compiling import disk_cache

PACKAGE = "flash-attn-4"
NEEDS = {"flash_attn.cute": PACKAGE, "quack": "quack-kernels", "einops": "einops", "cutlass": "nvidia-cutlass-dsl"}
HEADS, LENGTH = 16, 8192
BACKWARD_TILE = {"tile_m": 128, "tile_n": 128, "stages": 1}  # on Blackwell, written into its code
INSTALL = "pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 einops torch-c-dlpack-ext"


class PeerMissing(Exception):
    """The peer, or a package that it needs, is not installed; the message says what to install."""


class PeerRefused(Exception):
    """The peer has no kernel for the call, or its compiler failed; the message is the end of what it said."""


@dataclasses.dataclass(frozen=True)
class PeerCall:
    """A call of flash-attn-4 with many long sequences, of whose lengths and number its kernels know nothing.

    `group`: query heads of a key/value head. `window`: keys that a query sees to its left, None all of them. `packed`:
    sequences of different lengths, packed.
    """

    direction: str = "forward"
    dim: int = 128
    v_dim: int = 0
    group: int = 1
    causal: bool = False
    window: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class PeerKernel:
    """Its main kernel: rows and keys of its tiles, and how many tiles of rows a block has at once."""

    cubin: Path
    threads: int
    tile_m: int
    tile_n: int
    stages: int


def version() -> str:
    """The peer's version. Raises: `PeerMissing`."""
    lacking = [package for module, package in NEEDS.items() if not _found(module)]
    if lacking:
        raise PeerMissing(f"not installed: {', '.join(lacking)}; {INSTALL}")
    return importlib.metadata.version(PACKAGE)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def peer_kernel(call: PeerCall, arch: str) -> PeerKernel:
    """The main kernel of `call` for `arch`, compiled now (3 to 8 seconds) or earlier.

    Raises: `PeerMissing`, `PeerRefused`.
    """
    made_by = f"{version()} cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')} {arch} {call}"
    folder = disk_cache.usable() / PACKAGE / hashlib.sha256(made_by.encode()).hexdigest()[:24]
    if not (folder / "tile.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        seconds_to_compile(call, arch, folder)
    found = list(folder.glob(f"*flash_{'fwd' if call.direction == 'forward' else 'bwd'}_sm*.cubin"))
    if not found:
        raise PeerRefused(f"{PACKAGE} has kernels of their own for this call (gradients of D 256: two), not read here")
    (cubin,) = found
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", cubin.with_suffix(".ptx").read_text())
    assert threads is not None
    return PeerKernel(cubin, int(threads.group(1)), **json.loads((folder / "tile.json").read_text()))


def seconds_to_compile(call: PeerCall, arch: str, folder: Path) -> tuple[float, float]:
    """Compiles its kernels into an empty folder, in a process of its own: seconds of the wall and of CPUs that the call
    takes there, imports left out. Raises: `PeerRefused`.
    """
    environment = os.environ | {
        "FLASH_ATTENTION_ARCH": arch.rstrip("a"),
        "FLASH_ATTENTION_NUM_SMS": str(TARGETS[arch].sms),
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_KEEP_PTX": "1",
        "CUTE_DSL_DUMP_DIR": str(folder),
    }
    asked = [sys.executable, "-m", "benchmarks.model.peer", str(folder), json.dumps(dataclasses.asdict(call))]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerRefused(f"{PACKAGE} compiled nothing for {call} on {arch}: {done.stderr[-1500:]}")
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


# --- in the process that compiles -------------------------------------------------------------------------------


def _compile(folder: Path, call: PeerCall) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    interface = _interface()
    tiles: list[dict[str, int]] = []
    for name in ("_get_fwd_config", "_tile_size_bwd_sm90"):
        setattr(interface, name, _watched(getattr(interface, name), tiles))
    heads, kv_heads, v_dim = HEADS * call.group, HEADS, call.v_dim or call.dim
    started = time.perf_counter(), _cpu()
    with FakeTensorMode(allow_non_fake_inputs=True):

        def empty(heads: int, dim: int, *, rows_last: bool = False) -> torch.Tensor:
            rows = (2 * LENGTH,) if call.packed else (2, LENGTH)
            shape = (*rows[:-1], heads, rows[-1]) if rows_last else (*rows, heads, dim)
            return torch.empty(shape, dtype=torch.float32 if rows_last else torch.bfloat16, device="cuda")

        q, k, v = empty(heads, call.dim), empty(kv_heads, call.dim), empty(kv_heads, v_dim)
        if call.direction == "backward":
            given = (q, k, v, empty(heads, v_dim), empty(heads, v_dim), empty(heads, 0, rows_last=True))
            options = {"causal": call.causal and call.window is None, "softcap": call.softcap} | _window(call)
            interface._flash_attn_bwd(*given, **options, **_ends(call))
        elif call.packed:
            interface.flash_attn_varlen_func(q, k, v, causal=call.causal, **_ends(call))
        else:
            interface.flash_attn_func(q, k, v, **_forward_options(call))
    print(time.perf_counter() - started[0], _cpu() - started[1])
    (folder / "tile.json").write_text(json.dumps(tiles[-1] if tiles else BACKWARD_TILE))


def _cpu() -> float:
    """Seconds of this process and of those it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _interface() -> Any:
    """flash_attn.cute.interface, without quack's own kernels, which import triton, and without asking the driver."""
    import torch  # noqa: F401

    found = importlib.util.find_spec("quack")
    assert found is not None and found.submodule_search_locations
    import cutlass.utils.hardware_info

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = _Device
    bare = types.ModuleType("quack")
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules["quack"] = bare
    importlib.import_module("quack.dsl")
    return importlib.import_module("flash_attn.cute.interface")


class _Device:
    """What a persistent kernel's grid asks of a device. It is no part of the machine code."""

    def __init__(self, device_id: int = 0) -> None:
        self.sms = int(os.environ["FLASH_ATTENTION_NUM_SMS"])

    def get_max_active_clusters(self, cluster_size: int, **_: Any) -> int:
        return self.sms // cluster_size

    def get_device_multiprocessor_count(self) -> int:
        return self.sms


def _watched(function: Any, tiles: list[dict[str, int]]) -> Any:
    """`function`, whose answers' tile sizes are also written down."""

    @functools.wraps(function)
    def watched(*arguments: Any, **named: Any) -> Any:
        chosen = function(*arguments, **named)
        stages = getattr(chosen, "q_stage", 1)
        tiles.append({"tile_m": chosen.m_block_size, "tile_n": chosen.n_block_size, "stages": stages})
        return chosen

    return watched


def _window(call: PeerCall) -> dict[str, Any]:
    return {} if call.window is None else {"window_size_left": call.window, "window_size_right": 0}


def _forward_options(call: PeerCall) -> dict[str, Any]:
    from benchmarks.implementations import cute_alibi

    options: dict[str, Any] = {"causal": call.causal and call.window is None, "softcap": call.softcap}
    if call.window is not None:
        options["window_size"] = (call.window, 0)
    if call.alibi:
        options["score_mod"] = cute_alibi(HEADS * call.group)
    return options


def _ends(call: PeerCall) -> dict[str, Any]:
    import torch

    if not call.packed:
        return {}
    starts = torch.empty(9, dtype=torch.int32, device="cuda")
    longest_is = LENGTH // 3
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest_is, "max_seqlen_k": longest_is}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _compile(Path(sys.argv[1]), PeerCall(**json.loads(sys.argv[2])))
