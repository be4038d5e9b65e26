"""All instructions beyond arithmetic: importing this fills the tables."""

from __future__ import annotations

from composattn.emulator.opcodes import (  # noqa: F401  (they fill the tables)
    access,
    async_copies,
    bulk,
    cancel,
    lanes,
    matrix,
    synchronise,
    tensor_access,
    tensor_mma,
    warp_matrix,
)
from composattn.emulator.opcodes.registry import EFFECTS, SYNCS, Maker, find
from composattn.emulator.ptx import Instr


def find_effect(instr: Instr) -> Maker | None:
    return find(EFFECTS, instr.op)


def find_sync(instr: Instr) -> Maker | None:
    return find(SYNCS, instr.op)
