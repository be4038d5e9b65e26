"""Small PTX kernels for the emulator's tests: a body between loads of the inputs and stores of the results."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from composattn.emulator.launch import Result, Stream, run
from composattn.emulator.mode import EAGER, Mode
from composattn.emulator.program import PtxProgram
from composattn.emulator.request import Launch
from composattn.emulator.tensormap import TensorMap

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
DECLARE = """
.reg .pred %p<40>;
.reg .b16 %h<40>;
.reg .b32 %r<200>;
.reg .b64 %d<40>;
"""


def module(body: str, params: int = 0, maps: int = 0, threads: int = 32, shared: int = 0) -> str:
    """A kernel with `maps` tensor maps m0, m1, ... and then `params` 64-bit parameters p0, p1, ..."""
    declared = [f".param .align 64 .b8 m{i}[128]" for i in range(maps)] + [f".param .u64 p{i}" for i in range(params)]
    array = f".shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    head = f"{HEAD}.visible .entry k({', '.join(declared)})\n.reqntid {threads}, 1, 1\n"
    return f"{head}{{\n{DECLARE}{array}{body}\nret;\n}}\n"


def execute(
    text: str,
    arrays: list[Any] | None = None,
    *,
    maps: list[TensorMap] | None = None,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    mode: Mode = EAGER,
    dynamic_shared: int = 0,
    stream: Stream | None = None,
    sms: int = 132,
) -> Result:
    """Runs it with arrays as its 64-bit parameters (numbers pass as they are); in a stream, it starts early."""
    arrays, maps = arrays or [], maps or []
    params = [b""] * len(maps)
    params += [struct.pack("<Q", a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arrays]
    launch = Launch(
        (grid, 1, 1), (threads, 1, 1), params, (cluster, 1, 1), dynamic_shared, dict(enumerate(maps)), sms=sms
    )
    for i, a in enumerate(arrays):
        if isinstance(a, np.ndarray):
            launch.memory.add(a.ctypes.data, a.reshape(-1).view(np.uint8), f"array {i}")
    if stream is None:
        return run(PtxProgram(text), launch, mode)
    launch.early = True
    return stream.run(PtxProgram(text), launch, mode)


def apply(instruction: str, result: str, inputs: list[tuple[str, Any]]) -> Any:
    """One instruction on 32 lanes: `instruction` names its operands {d}, {a}, {b}, {c}, {e}; types give the registers.

    A type is p, or b/u/s/f and a width; 8-bit values travel in 16-bit registers.
    """
    names, body, arrays = {}, ["mov.u32 %r199, %tid.x;"], []
    for i, (letter, (kind, values)) in enumerate(zip("abce", inputs, strict=False)):
        width = 8 if kind == "p" else int(kind[1:])
        array = np.ascontiguousarray(values)
        arrays.append(array)
        body += [
            f"ld.param.u64 %d{i}, [p{i}];",
            f"mul.wide.u32 %d39, %r199, {width // 8};",
            f"add.u64 %d{i}, %d{i}, %d39;",
        ]
        bank = {8: "h", 16: "h", 32: "r", 64: "d"}[width]
        register = f"%{bank}{10 + i}"
        body.append(f"ld.global.{'u' if width == 8 else 'b'}{width} {register}, [%d{i}];")
        if kind == "p":
            body.append(f"setp.ne.b16 %p{10 + i}, {register}, 0;")
            register = f"%p{10 + i}"
        names[letter] = register
    n = len(inputs)
    width = 32 if result == "p" else int(result[1:])
    bank = "p" if result == "p" else {8: "h", 16: "h", 32: "r", 64: "d"}[width]
    names["d"] = f"%{bank}20"
    body.append(instruction.format(**names) + ";")
    out = np.full(32, 0xA5, {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[width])
    body += [f"ld.param.u64 %d{n}, [p{n}];", f"mul.wide.u32 %d39, %r199, {width // 8};", f"add.u64 %d{n}, %d{n}, %d39;"]
    source = names["d"]
    if result == "p":
        body.append(f"selp.b32 %r21, 1, 0, {source};")
        source = "%r21"
    body.append(f"st.global.b{width} [%d{n}], {source};")
    execute(module("\n".join(body), n + 1), [*arrays, out])
    return out
