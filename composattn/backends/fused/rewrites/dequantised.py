"""Keys and values of 8 bits that many rows read, made 16-bit numbers in memory before the kernel, which is exact.

A kernel makes a 16-bit tile of the bytes each time that a tile of rows comes to it. Where these are many, it is made
once, by another pass over memory, and all of them read 16 bits. So it is for any number of rows where kernels read no
bytes.
"""

from __future__ import annotations

import dataclasses

from ....call.eight_bits import EIGHT_BITS
from ..tiles.architecture import architecture_of
from .posed import Found, Nothing, Posed, Rewritten

# Rows of a key/value head from which the pass pays. For 8 heads of D 128 it takes 15 µs of 8k keys, 54 of 32k (one
# H200). Time over that of 16 bits by the pass, and by a kernel that converts: 1.17 and 1.34 of 2,048 rows and 8k keys,
# 1.17 and 1.37 of 32k; of 1,024 rows 1.25 and 1.23, and 1.30 and 1.35; of 256 rows 1.93 and 1.25
MANY = 2048


def dequantised(posed: Posed) -> Found:
    """The call with 16-bit k and v, which its launch makes of those it gets; not of pages, of which few may be read."""
    problem = posed.problem
    multiplied = problem.types.q in EIGHT_BITS
    if problem.narrow is None or multiplied or problem.layout.kv == "paged":
        return Nothing()
    architecture = architecture_of(posed.target)
    if architecture.refuses_eight_bits(problem, posed.program):
        return Nothing()
    rows = problem.queries * problem.group
    if rows < MANY and architecture.reads_eight_bits:
        return Nothing(f"{rows} rows read each key, of fewer than {MANY} a kernel makes 16 bits where it needs them")
    wide = dataclasses.replace(problem, narrow=None)
    return Rewritten(dataclasses.replace(posed, problem=wide), f"k and v in {problem.dtype} for {rows} rows each")
