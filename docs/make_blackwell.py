"""Writes the generated parts of docs/blackwell.md: plans as they are made, and the kernel's own words.

    python docs/make_blackwell.py

It needs no kernel language: kernels are read as text. The rest of the page is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import composattn as ca
from benchmarks.report import between
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import BLACKWELL, TARGETS
from composattn.call.problem import Problem
from composattn.mods import causal, sliding_window

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("blackwell.md")
KERNEL = ROOT / "composattn" / "backends" / "blackwell"
SHAPES = (((64, 64), 4096), ((96, 96), 4096), ((128, 128), 4096), ((192, 128), 4096), ((192, 192), 4096),
          ((256, 256), 4096), ((128, 128), 1))  # fmt: skip

NARROW = ((128, 128), causal() & sliding_window(128), ", window of 128")


def planned(dims: tuple[int, int], q_len: int, arch: str) -> ForwardPlan:
    target = next(target for target in TARGETS.values() if target.arch == arch)
    problem = Problem(1, 8, 8, q_len, 4096, *dims, torch.bfloat16, torch.device("cpu"))
    return plan_forward(problem, ca.Attention(mask_mod=causal("bottom_right")).program, target)


def backward() -> Iterator[str]:
    """Tiles, stages and tensor memory of the backward by head dimension."""
    yield "| D / Dv | tiles | stages | tensor memory |"
    yield "|---|---|---|---|"
    mask = causal("bottom_right")
    for dims, mod, words in (*((dims, mask, "") for dims, _ in SHAPES[:-1]), NARROW):
        problem = Problem(1, 8, 8, 4096, 4096, *dims, torch.bfloat16, torch.device("cpu"))
        said = said_of(plan_backward(problem, ca.Attention(mask_mod=mod).program, BLACKWELL).main)
        tiles = said["tiles"].rpartition(", on chip")[0]
        stages = ", ".join(words for words in said["form"].split(", ") if "stages" in words)
        yield f"| {' / '.join(map(str, dims))}{words} | {tiles} | {stages} | {said['columns']} |"


def said_of(plan: object) -> dict[str, str]:
    """What the plan prints, by the word before it."""
    return {line[:12].strip(): line[12:].strip() for line in str(plan).splitlines()[1:]}


def memory() -> Iterator[str]:
    """Tiles and tensor memory by head dimension, and who computes exponentials on each target."""
    yield "| D / Dv, queries | tiles | tensor memory | exponentials, sm_100a | sm_103a |"
    yield "|---|---|---|---|---|"
    for dims, q_len in SHAPES:
        here, there = (said_of(planned(dims, q_len, arch)) for arch in ("sm_100a", "sm_103a"))
        units = " | ".join(said.get("exp2", "all columns by hardware") for said in (here, there))
        tiles = here["tiles"].partition(",")[0]
        yield f"| {' / '.join(map(str, dims))}, {q_len} | {tiles} | {here['columns']} | {units} |"


def parts_of(file: str, name: str) -> list[str]:
    """The docstring of a class by paragraphs, read and not imported."""
    tree = ast.parse((KERNEL / file).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return inspect.cleandoc(ast.get_docstring(found) or "").split("\n\n")


def drawn(parts: list[str]) -> list[str]:
    """The indented parts, unchanged."""
    return [f"```\n{inspect.cleandoc(part)}\n```" for part in parts if part.startswith("    ")]


def page() -> str:
    two, one = drawn(parts_of("forward.py", "BlackwellForward"))
    generated = {
        "timeline": f"{two}\n\nand of one, which has two places for scores:\n\n{one}",
        "edges": drawn(parts_of("block.py", "BlackwellForwardBlock"))[0],
        "plan": f"```\n{planned((128, 128), 4096, 'sm_100a')}\n```",
        "memory": "\n".join(memory()),
        "wide": drawn(parts_of("backward_wide.py", "WideProducts"))[0],
        "backward": "\n".join(backward()),
        "query-pairs": drawn(parts_of("backward_query_pair.py", "QueryPairProducts"))[0],
        "query-pair-edges": drawn(parts_of("backward_query_pair.py", "QueryPairBlock"))[0],
        "pairs": drawn(parts_of("backward_pair.py", "PairProducts"))[0],
        "pair-edges": drawn(parts_of("backward_pair.py", "BlackwellPairBlock"))[0],
        "strips": drawn(parts_of("tensor_memory.py", "WidePairBackwardTensorMemory"))[0],
        "wide-pairs": drawn(parts_of("backward_wide_pair.py", "WidePairProducts"))[0],
        "wide-pair-edges": drawn(parts_of("backward_wide_pair.py", "WidePairBlock"))[0],
    }
    text = PAGE.read_text()
    for name, part in generated.items():
        text = between(text, part, name, "docs/make_blackwell.py")
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
