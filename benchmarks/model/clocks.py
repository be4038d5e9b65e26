"""What each unit of an SM does in a clock, by target, with sources; exponentials, which plans know, are the target's.

guide    CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", of compute capability 9.0, in
         results per clock and SM; taken to hold for 10.0 and 10.3
paper    FlashAttention-4 (2026), sections 2.2 and 3.1.3
log      benchmarks/log/2026-11.md#backward-28: 48 KiB of dQ in 1920 clocks, 25.6 bytes, where nothing else was the
         limit
assumed  no public figure known: paired fp32 instructions leave the rate of results as it is
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from benchmarks.model.sass import SassInstruction
from composattn.backends.fused.tiles.target import TARGETS as GPUS
from composattn.backends.fused.tiles.target import Target

# A matrix product, shared memory's port, exponentials, multiply-adds, other arithmetic, instructions at all, additions
# into global memory. All but the first two and the last are of one of the four partitions of an SM.
UNITS = ("matrix", "shared", "exp", "fma", "alu", "issue", "reduce")
PARTITIONS = 4
LANES = 32


class UnknownOpcode(Exception):
    """Machine code has an instruction that no row of `OPCODES` names."""


@dataclasses.dataclass(frozen=True)
class Clocks:
    """Rates of one SM: per clock, and of it all (not of a partition).

    `matrix` is in 16-bit operations (a multiply-add is two), `shared` and `reduce` in bytes, the others in results.
    """

    arch: str
    sms: int
    matrix: int  # paper
    exp: int  # guide, paper
    other_special: int  # guide: reciprocals, tanh, conversions between integers and floats
    fma: int  # guide
    half_rate: int  # guide: compare, select, minimum, shift, logic, integer sums and products, pack to 16 bits
    shared: int = 128  # paper
    reduce: int = 24  # log

    @staticmethod
    def of_target(gpu: Target) -> Clocks:
        fma = 64 if gpu.arch == "sm_80" else 128
        return Clocks(gpu.arch, gpu.sms, MATRIX[gpu.arch], gpu.exp2_per_clock, 16, fma, 64)

    def of(self, kind: str) -> float:
        """Clocks in which a partition takes an instruction of this kind from a warp."""
        results = {
            "exp": self.exp, "special": self.other_special, "fma": self.fma, "fma2": self.fma / 2,
            "imad": self.half_rate, "alu": self.half_rate,
        }  # fmt: skip
        return LANES * PARTITIONS / results[kind] if kind in results else 0.0


# Products with fp32 sums; before Hopper by the data sheets' dense numbers, SMs and clocks.
MATRIX = {"sm_80": 2048, "sm_87": 2048, "sm_86": 512, "sm_89": 512, "sm_120a": 512, "sm_121a": 512}
MATRIX |= {"sm_90a": 4096, "sm_100a": 8192, "sm_103a": 8192}

# Of sm_103a the exponential is doubled (paper); reciprocals and tanh are not known to be.
TARGETS: Mapping[str, Clocks] = {gpu.arch: Clocks.of_target(gpu) for gpu in GPUS.values()}

# The unit of each kind of instruction.
UNIT_OF = {"exp": "exp", "special": "exp", "fma": "fma", "fma2": "fma", "imad": "fma", "alu": "alu"}

# Names without suffixes, by kind. `shared`: through the port of shared memory, with the bytes in its suffix. `other`
# takes a slot to be issued and nothing that is modelled; so do all of the uniform datapath (U...).
OPCODES: Mapping[str, str] = {
    name: kind
    for kind, names in {
        "matrix": "HGMMA UTCHMMA UTCQMMA",
        "fma": "FFMA FMUL FADD HFMA2 HADD2 HMUL2 FSWZADD",
        "fma2": "FFMA2 FMUL2 FADD2",  # assumed: two results a lane
        "imad": "IMAD IDP",
        "alu": (
            "FMNMX FMNMX3 FSEL FSETP FSET ISETP IADD3 IADD IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX LOP3 LOP SEL SHF PRMT "
            "LEA MOV CS2R F2FP R2P P2R PLOP3 VOTE I2FP BMSK SGXT IABS FCHK HMNMX2 HSETP2 HSET2 FLO POPC BREV I2F2 "
            "VABSDIFF LEPC"
        ),
        "exp": "MUFU",
        "special": "I2F F2I F2F FRND I2I S2R",
        "shared": "LDS STS LDSM STSM SHFL ATOMS REDUX MATCH",
        "other": (
            "BRA BRX JMP CALL RET EXIT BSSY BSYNC BREAK WARPSYNC NOP YIELD BAR B2R R2B DEPBAR LDGDEPBAR SYNCS MEMBAR "
            "FENCE ELECT ERRBAR CCTL CCTLL NANOSLEEP BPT WARPGROUP WARPGROUPSET USETMAXREG S2UR R2UR UR2R REDG RED "
            "ATOM ATOMG LDG STG LD ST LDC LDCU RPCMOV STAS LDL STL LDGSTS LDTM STTM LDT STT UTCBAR ACQBULK ARRIVES "
            "PREEXIT CREDUX VOTEU ACQSHMINIT GETLMEMBASE CGAERRBAR KILL ENDCOLLECTIVE COLLECTIVE"
        ),
    }.items()
    for name in names.split()
}
_WIDTH = re.compile(r"\.(128|64|U?16|U8|S8)\b")
_BYTES = {"128": 16, "64": 8, "16": 2, "U16": 2, "U8": 1, "S8": 1}


def kind_of(instruction: SassInstruction) -> str:
    """What the instruction keeps busy, a value of `OPCODES`; raises `UnknownOpcode`."""
    name = instruction.name
    kind = OPCODES.get(name) or ("other" if name.startswith("U") else None)
    if kind is None:
        raise UnknownOpcode(f"{name} has no unit: give it one in benchmarks/model/clocks.py ({instruction.text})")
    if kind == "exp" and not instruction.text.startswith("MUFU.EX2"):
        return "special"
    return kind


def shared_bytes(instruction: SassInstruction) -> int:
    """Bytes that a warp's instruction moves through the port of shared memory."""
    if kind_of(instruction) != "shared":
        return 0
    if instruction.name in ("LDSM", "STSM"):  # matrices of 8 rows of 16 bytes
        count = re.search(r"\.([124])\b", instruction.text)
        return 128 * int(count.group(1) if count else 1)
    width = _WIDTH.search(instruction.text)
    return LANES * (_BYTES[width.group(1)] if width else 4)


_SHAPE = re.compile(r"\.64x(\d+)x16\b")


def product(instruction: SassInstruction) -> tuple[int, int]:
    """16-bit operations of a warpgroup's product (HGMMA), and the bytes of shared memory that it reads.

    Its left operand of 64 x 16 comes from shared memory where a descriptor stands for both, else from registers.
    """
    shape = _SHAPE.search(instruction.text)
    if instruction.name != "HGMMA" or shape is None:
        return 0, 0
    columns = int(shape.group(1))
    left_in_registers = re.search(r"\bR\d+, R\d+, gdesc", instruction.text) is not None
    return 2 * 64 * 16 * columns, 2 * 16 * (columns + (0 if left_in_registers else 64))


def busy(instructions: Iterable[SassInstruction], clocks: Clocks) -> dict[str, float]:
    """Clocks that one warp's instructions take of each unit; those of HGMMA and of shared memory are of the whole SM.

    A product of four warps is counted a quarter for each of them, so that four of these are the warpgroup's.
    """
    total = dict.fromkeys(UNITS, 0.0)
    for instruction in instructions:
        kind = kind_of(instruction)
        total["issue"] += 1
        if kind in UNIT_OF:
            total[UNIT_OF[kind]] += clocks.of(kind)
        operations, read = product(instruction)
        total["matrix"] += operations / clocks.matrix / 4
        total["shared"] += (read / 4 + shared_bytes(instruction)) / clocks.shared
    return total
