"""A kernel's machine code as instructions in order: their names, and where branches lead."""

from __future__ import annotations

import dataclasses
import functools
import re

from composattn.backends.fused.compiling.inspect import Artifact


@dataclasses.dataclass(frozen=True)
class SassInstruction:
    """A machine instruction: its name with no suffix, for a branch the number of the one it jumps to, and its text.

    `predicate`: what decides whether it is carried out, as `@!P0`; empty where nothing does.
    """

    name: str
    target: int | None
    text: str
    predicate: str = ""


_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_JUMP = re.compile(r"\((\.L_x_\d+)\)")


def instructions(made: Artifact) -> tuple[SassInstruction, ...]:
    """The machine code in order; empty where nvdisasm is not installed."""
    return disassembled(made.assembly)


@functools.lru_cache(maxsize=64)
def disassembled(text: str) -> tuple[SassInstruction, ...]:
    """The instructions of nvdisasm's text."""
    rows: list[tuple[str, str | None, str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, found = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            labels[label.group(1)] = len(rows)
        elif found:
            predicate, name, rest = found.groups(default="")
            jump = _JUMP.search(rest) if name == "BRA" else None
            rows.append((name, jump.group(1) if jump else None, name + rest, predicate.strip()))
    return tuple(
        SassInstruction(name, labels.get(jump) if jump else None, text, predicate)
        for name, jump, text, predicate in rows
    )
