"""Writes docs/combinations.md: every combination of mod, layout, mask, heads and pass on each backend, by running it.

    python docs/make_combinations.py                             the page, from what is recorded
    python docs/make_combinations.py streaming reference         runs these backends first, all cells
    python docs/make_combinations.py hopper --jobs 16            on a GPU
    python docs/make_combinations.py hopper-emulated --missing   only cells not recorded as right

What came out is kept in docs/combinations.json, cell by cell. Stops at a result that is neither right nor refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import combinations
from tests.combinations import OK, Cell, cells, outcome

PAGE, RECORD = Path(__file__).with_name("combinations.md"), Path(__file__).with_name("combinations.json")
BACKENDS = ("reference", "streaming", "hopper-emulated", "hopper", "blackwell-emulated")

Outcomes = dict[str, dict[str, str]]
"""Backend → cell → what came out."""


def recorded() -> Outcomes:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def page(outcomes: Outcomes) -> str:
    """The page as text."""
    return "\n".join([_head(), *itertools.chain(*(_table(b, outcomes[b]) for b in BACKENDS if b in outcomes))])


HEAD = """\
# Which combinations work

`python docs/make_combinations.py` made this page by running each cell. Its outputs and its gradients were held to the
tolerance rule of `composattn.testing` against fp64. Columns are masks whose kv tiles come from a *band*
(`causal & sliding_window`), from *tiles* (`neighborhood`, by interval analysis) and from a user's blocks
(`BlockSparse`). A cell says forward, backward, and deterministic backward (run twice more, the same bits).

- ✓ is right; a letter is a refusal, by the named error below the table; · has not been run.
- bf16, D and Dv {dim}, wide heads D {wide} and Dv {wide_v}; MHA {mha} heads, GQA {gqa} heads. Dense: {q_len} queries,
  {kv_len} keys. Varlen: {q_lens} queries, {kv_lens} keys. Paged: {paged_q_len} queries each, {paged_kv_lens} keys in
  pages of {page_size}.
- *offsets*: mask and score mod are shifted, by numbers, run-time numbers and tensors, as for a rank's part of a call.
  *largest scores*: `return_max_scores=True`, held to fp64 too. *keys of 8 bits*: k and v by `ca.quantize`, a scale a
  row; gradients go straight through, by 16 bits.
"""


def _head() -> str:
    c = combinations
    mha, gqa = ("{} on {}".format(*c.HEADS[name]) for name in ("MHA", "GQA"))
    q_lens, kv_lens, paged_kv_lens = (", ".join(map(str, n)) for n in (c.Q_LENS, c.KV_LENS, c.PAGED_KV_LENS))
    return HEAD.format(
        dim=c.DIM,
        wide=c.DIMS["wide heads"][0],
        wide_v=c.DIMS["wide heads"][1],
        mha=mha,
        gqa=gqa,
        q_len=c.Q_LEN,
        kv_len=c.KV_LEN,
        q_lens=q_lens,
        kv_lens=kv_lens,
        paged_q_len=c.PAGED_Q_LEN,
        paged_kv_lens=paged_kv_lens,
        page_size=c.PAGE_SIZE,
    )


def _table(backend: str, outcomes: dict[str, str]) -> Iterator[str]:
    refusals: dict[str, str] = {}

    def mark(cell: Cell) -> str:
        said = outcomes.get(str(cell))
        if said is None or said == OK:
            return "·" if said is None else "✓"
        return refusals.setdefault(said, "abcdefghijklmnopqrstuvwxyz"[len(refusals)])

    columns = list(itertools.product(combinations.LAYOUTS, combinations.MASKS))
    right = sum(said == OK for said in outcomes.values())
    yield f"## {backend}"
    yield ""
    yield f"{right} of {len(cells())} right, {len(outcomes) - right} refused by name."
    yield ""
    yield "| mod | heads | " + " | ".join(f"{layout} {mask}" for layout, mask in columns) + " |"
    yield "|" + "---|" * (len(columns) + 2)
    for mod, heads in itertools.product(combinations.MODS, combinations.HEADS):
        marks = ([mark(Cell(mod, *c, heads, way)) for way in combinations.PASSES] for c in columns)
        yield f"| {mod} | {heads} | " + " | ".join(map(" ".join, marks)) + " |"
    yield ""
    for said, letter in refusals.items():
        name, message = said.split(": ", 1)
        yield f"- {letter}: `{name}`: {message}"
    if refusals:
        yield ""


def _one(asked: tuple[Cell, str]) -> tuple[str, str]:
    torch.set_num_threads(1)
    cell, backend = asked
    try:
        return str(cell), outcome(cell, backend, "cuda" if backend == "hopper" else "cpu")
    except Exception as error:
        raise RuntimeError(f"{backend}: {cell} is neither right nor refused") from error


def record(backend: str, jobs: int, missing: bool) -> None:
    """Runs the cells of a backend and keeps what came out, each as soon as it is known."""
    kept = recorded().get(backend, {}) if missing else {}
    left = [cell for cell in cells() if kept.get(str(cell)) != OK]
    left.sort(key=lambda cell: combinations.PASSES.index(cell.way))  # a gradient needs the kernel of the forward too
    asked = [(cell, backend) for cell in left]
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        for number, (cell, said) in enumerate(pool.imap(_one, asked), start=1):
            kept[cell] = said
            RECORD.write_text(json.dumps(recorded() | {backend: kept}, indent=0, ensure_ascii=False) + "\n")
            print(f"{backend} {number}/{len(asked)} {cell}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[*BACKENDS, []])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--missing", action="store_true", help="keep what is recorded as right, run the rest")
    options = parser.parse_args()
    for backend in options.backends:
        record(backend, options.jobs, options.missing)
    PAGE.write_text(page(recorded()))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
