"""The Blackwell kernels, compiled for each head dimension, dtype, mod, layout and target: is each kernel lean?

    python -m tests.compile.blackwell_matrix --seconds 450            cells with no row yet, for so long; go on by again
    python -m tests.compile.blackwell_matrix d128 sm_103a             cells with all these words in their names
    python -m tests.compile.blackwell_matrix --backward ...           the same of the kernels of gradients
    python -m tests.compile.blackwell_matrix --part 3/48 --record 3.json      each 48th cell from the third on
    python -m tests.compile.blackwell_matrix --gather 1.json 2.json ...       rows of several records into one
    python -m tests.compile.blackwell_matrix --check --part 1/60              are cells still as the record says?

`benchmarks/results/compiled/blackwell.json` keeps what was made of each cell (`blackwell-backward.json`: of gradients),
if no other record is named. Rows of other sources are dropped, but for `--check`: of most changes kernels know nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import composattn as ca
from benchmarks import provenance
from composattn import mods
from composattn.backends.blackwell.tensor_memory import COLUMNS
from composattn.backends.fused.compiling import toolchain
from composattn.backends.fused.compiling.compile import compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import BackwardPlan, plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL, TARGETS, Target
from composattn.call.problem import DENSE
from composattn.call.schedule import Schedule
from tests.compile.blackwell_plans import HEADS, LENGTH, PACKED, PAGES, problem_of, program_of
from tests.compile.golden import language

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "compiled" / "blackwell.json"
BACKWARD_RECORD = RECORD.with_stem("blackwell-backward")
DIMS = {"d128": (128, 128), "d64": (64, 64), "d192/128": (192, 128), "d256": (256, 256), "d96": (96, 96),
        "d192": (192, 192)}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IDS = torch.arange(LENGTH, dtype=torch.int32) // 300
BLOCKS = torch.ones(1, 1, LENGTH // 128, LENGTH // 128, dtype=torch.bool).tril()
MODS: dict[str, Callable[[], ca.Attention]] = {
    "none": lambda: ca.Attention(),
    "causal": lambda: ca.Attention(mask_mod=mods.causal()),
    "documents": lambda: ca.Attention(mask_mod=mods.document(IDS)),
    "block-sparse": lambda: ca.Attention(mask_mod=ca.BlockSparse(BLOCKS, 128, partial=mods.causal())),
    "alibi": lambda: ca.Attention(score_mod=mods.alibi(HEADS), mask_mod=mods.causal()),
    "softcap": lambda: ca.Attention(score_mod=mods.softcap(30.0), mask_mod=mods.causal()),
    "relative-bias": lambda: ca.Attention(
        score_mod=mods.relative_bias(torch.zeros(HEADS, 2 * 128 + 1)), mask_mod=mods.causal()
    ),
    "window": lambda: ca.Attention(mask_mod=mods.sliding_window(512)),
}
"""Score mods under a causal mask, so that tiles with a test and without are there."""


LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "split": {"q_len": 8, "kv_heads": 2, "schedule": Schedule(split_kv=2)},  # packed rows, one query tile
    "paged": {"layout": PAGES},
    "varlen": {"layout": PACKED},
}
"""How the sequences of a call lie, how many queries they have, how the work is divided: of `problem_of`."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kernel, by the names of its parts."""

    target: Target
    dtype: str
    layout: str
    dim: str
    mod: str

    def __str__(self) -> str:
        return f"{self.target.arch} {self.dtype} {self.layout} {self.dim} {self.mod}"

    @property
    def plan(self) -> ForwardPlan | BackwardPlan:
        d, dv = DIMS[self.dim]
        problem = problem_of(d, dv, DTYPES[self.dtype], **LAYOUTS[self.layout])
        return plan_forward(problem, MODS[self.mod]().program, self.target)


LEARNED = {
    name: torch.zeros(size, requires_grad=True)
    for name, size in {"row": (HEADS, LENGTH), "column": (LENGTH,), "distance": (HEADS, 2 * LENGTH),
                       "pair": (LENGTH, LENGTH), "head": (HEADS,)}.items()
}  # fmt: skip
SUMS: dict[str, Callable[..., object]] = {
    "by-row": lambda s, b, h, q, kv: s + 0.01 * LEARNED["row"][h, q] * (q - kv),
    "by-column": lambda s, b, h, q, kv: s + LEARNED["column"][kv],
    "by-distance": lambda s, b, h, q, kv: s + LEARNED["distance"][h, q - kv + LENGTH],
    "by-distance-in-softcap": lambda s, b, h, q, kv: 5 * torch.tanh((s + LEARNED["distance"][h, q - kv + LENGTH]) / 5),
    "by-pair": lambda s, b, h, q, kv: s + LEARNED["pair"][q, kv],
    "by-head": lambda s, b, h, q, kv: s - LEARNED["head"][h] * (q - kv),
}
"""Score mods that read a tensor whose gradient is summed, by the pattern of the sum."""
BACKWARD_LAYOUTS = {"dense": (DENSE, False), "varlen": (PACKED, False), "in-order": (DENSE, True)}


@dataclasses.dataclass(frozen=True)
class BackwardCell(Cell):
    """The kernel of dK and dV, and of the sums of dQ and of captured tensors; `in-order`: dQ in a fixed order."""

    @property
    def plan(self) -> BackwardPlan:
        (layout, in_order), (d, dv) = BACKWARD_LAYOUTS[self.layout], DIMS[self.dim]
        problem = problem_of(d, dv, DTYPES[self.dtype], layout)
        if self.mod in MODS:
            program = MODS[self.mod]().program
        else:
            program = program_of(SUMS[self.mod], mods.causal(), learned=True)
        return plan_backward(problem, program, self.target, deterministic=in_order, cut=None).main


def cells(backward: bool = False) -> list[Cell]:
    """All 768 (1008 of the backward), what differs most first: fp16 and sm_103a change single instructions."""
    targets = [TARGETS[10, minor] for minor in (0, 3)]
    layouts, named, kind = (BACKWARD_LAYOUTS, (*MODS, *SUMS), BackwardCell) if backward else (LAYOUTS, MODS, Cell)
    found = itertools.product(targets, DTYPES, layouts, DIMS, named)
    return sorted((kind(*names) for names in found), key=lambda cell: cell.dtype == "fp16")


# --- what a kernel has to be ----------------------------------------------------------------------------------

UNITS = {
    "UTCHMMA": "products into tensor memory", "LDTM": "loads of tensor memory", "STTM": "stores to tensor memory",
    "UTMALDG": "bulk tensor loads", "UTMASTG": "bulk tensor stores",
}  # fmt: skip


def faults(artifact: Artifact) -> Iterator[str]:
    """What keeps a kernel from being lean, in words; none for one that fits, spills nothing and uses its units.

    Wants cuobjdump and nvdisasm.
    """
    plan = artifact.plan
    assert isinstance(plan, ForwardPlan | BackwardPlan) and artifact.registers is not None
    if artifact.spills or artifact.stack:
        yield f"{artifact.spills} moves of spilled registers, {artifact.stack} bytes of stack"
    if artifact.shared_memory > BLACKWELL.shared_memory:
        yield f"{artifact.shared_memory} bytes of shared memory"
    if artifact.registers * artifact.threads > BLACKWELL.registers:
        yield f"{artifact.registers} registers for each of {artifact.threads} threads"
    for name, what in UNITS.items():
        direct = isinstance(plan, ForwardPlan) and plan.direct_store
        if not artifact.mnemonics[name] and not (name == "UTMASTG" and direct):
            yield f"no {what}"
    columns = allocated(plan)
    if columns > COLUMNS or not frees_what_it_allocates(artifact.ptx, columns):
        yield f"{columns} columns of tensor memory, or not freed on every path"


def allocated(plan: ForwardPlan | BackwardPlan) -> int:
    """Columns of tensor memory that a block asks for."""
    tiling: Any = plan.tiling
    return int((tiling.columns if isinstance(plan, BackwardPlan) else tiling.tensor_memory).allocated)


def frees_what_it_allocates(ptx: str, columns: int) -> bool:
    """One warp asks for so many columns and frees as many; no path ends between, and all threads meet before, those of
    a pair of blocks too.
    """
    asked = re.findall(r"mov\.b32 \t(%r\d+), (\d+);\n\ttcgen05\.alloc\S+ \t\[\S+\], \1;", ptx)
    freed = re.findall(r"mov\.b32 \t(%r\d+), (\d+);\n\ttcgen05\.dealloc\S+ \t%r\d+, \1;", ptx)
    if not [n for _, n in asked] == [n for _, n in freed] == [str(columns)]:
        return False
    held = ptx[ptx.index("tcgen05.alloc") : ptx.index("tcgen05.dealloc")]
    used = max(held.rindex(name) for name in ("tcgen05.ld", "tcgen05.mma", "mbarrier.try"))
    return "ret;" not in held and max(held.rfind("bar.sync"), held.rfind("barrier.cluster.wait")) > used


# --- the record -----------------------------------------------------------------------------------------------

Row = dict[str, object]


def row(cell: Cell) -> Row:
    """What the compiler made of a cell, in numbers, what is wrong with it, and a hash of its PTX (entry: `kernel`)."""
    plan = cell.plan
    with tempfile.TemporaryDirectory(prefix="composattn-") as aside:  # 200 kB each, which nobody asks for again
        made = compile_offline(plan, Path(aside))
        text = made.ptx.replace(made.entry, "kernel")
        return {
            "spills": made.spills, "stack": made.stack, "registers": made.registers, "shared": made.shared_memory,
            "columns": allocated(plan),
            "instructions": len(made.instructions), **{name: made.mnemonics[name] for name in UNITS},
            "faults": list(faults(made)), "ptx": hashlib.sha256(text.encode()).hexdigest()[:16],
        }  # fmt: skip


@dataclasses.dataclass
class Record:
    """Rows by the names of their cells, and what made them: `sources` is the hash of all that a kernel depends on."""

    language: str
    sources: str
    commit: str
    rows: dict[str, Row]

    @staticmethod
    def read(path: Path) -> Record:
        """The record in a file, as it was written."""
        kept = json.loads(path.read_text())
        rows = {name: dict(zip(kept["fields"], values, strict=True)) for name, values in kept["rows"].items()}
        return Record(kept["language"], kept["sources"], kept["commit"], rows)

    @staticmethod
    def of_these_sources(path: Path) -> Record:
        """Without rows that other sources made."""
        here = Record(language(), toolchain.source_hash(), provenance.commit(), {})
        kept = Record.read(path) if path.exists() else here
        return kept if (kept.language, kept.sources) == (here.language, here.sources) else here

    def write(self, path: Path) -> None:
        """A line a row, its values in the order of `fields`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head: dict[str, object] = {"language": self.language, "sources": self.sources, "commit": self.commit}
        head["fields"] = list(next(iter(self.rows.values())))
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(list(row.values()))}" for name, row in self.rows.items())
        path.write_text("{\n" + ",\n".join([*lines, f'"rows": {{\n{rows}\n}}']) + "\n}\n")


def gather(paths: list[Path], record: Path, every: list[Cell]) -> Record:
    """All rows of several records, in the order of cells."""
    found = Record.of_these_sources(record)
    for path in paths:
        found.rows |= Record.of_these_sources(path).rows
    found.rows = {str(cell): found.rows[str(cell)] for cell in every if str(cell) in found.rows}
    found.write(record)
    return found


def wanted(words: list[str], part: str, every: list[Cell]) -> list[Cell]:
    """Cells with all words in their names; of those each N-th from the I-th on, with `part` I/N."""
    first, step = map(int, part.split("/"))
    return [cell for cell in every if all(word in str(cell).split() for word in words)][first - 1 :: step]


def compiled(left: list[Cell], record: Record, path: Path, seconds: float) -> None:
    """Rows of cells that have none yet into the record and its file, as each is made."""
    end = time.monotonic() + seconds
    for cell in left:
        if time.monotonic() > end:
            break
        begun = time.monotonic()
        found = record.rows[str(cell)] = row(cell)
        record.write(path)
        print(f"{cell}: {time.monotonic() - begun:.1f} s {found}", flush=True)


def check(asked: list[Cell], record: Record) -> int:
    """Compiles cells that the record has, and prints which are not as it says; 1 where one is not."""
    known = [cell for cell in asked if str(cell) in record.rows]
    other = 0
    for cell in known:
        was, now = record.rows[str(cell)], row(cell)
        if was != now:
            other += 1
            print(f"{cell}: {now}, was {was}", flush=True)
    print(f"of {len(known)} cells {len(known) - other} are as in the record of {record.commit[:7]}")
    return int(other > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compile.blackwell_matrix", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="compile no further cell after so long")
    parser.add_argument("--part", default="1/1", help="I/N: each N-th cell from the I-th on")
    parser.add_argument("--backward", action="store_true", help="of gradients")
    parser.add_argument("--record", type=Path, help="file that keeps the rows")
    parser.add_argument("--gather", type=Path, nargs="+", default=[], help="records whose rows go to it")
    parser.add_argument("--check", action="store_true", help="compile cells of the record again; 1 where one differs")
    parser.add_argument("words", nargs="*", help="only cells with all of these in their names")
    asked = parser.parse_args(arguments)
    every = cells(asked.backward)
    asked.record = asked.record or (BACKWARD_RECORD if asked.backward else RECORD)
    cells_asked = wanted(asked.words, asked.part, every)
    if asked.check:
        return check(cells_asked, Record.read(asked.record))
    if asked.gather:
        record = gather(asked.gather, asked.record, every)
    else:
        record = Record.of_these_sources(asked.record)
        left = [cell for cell in cells_asked if str(cell) not in record.rows]
        compiled(left, record, asked.record, asked.seconds)
    rows = [record.rows[str(cell)] for cell in cells_asked if str(cell) in record.rows]
    bad = sum(bool(found["faults"]) for found in rows)
    print(f"of {len(cells_asked)} cells {len(rows)} are compiled, {bad} are not lean")
    return int(bad > 0 or len(rows) < len(cells_asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
