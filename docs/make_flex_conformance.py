"""Writes docs/flex_conformance.md: where ca.flex_attention differs from torch's flex_attention, and why.

Run it from the repository: `python docs/make_flex_conformance.py`. The rows are data of the tests, which hold each of
them to be true; another test compares the page with what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cpu.flex_conformance.differences import DIFFERENCES

PAGE = Path(__file__).with_name("flex_conformance.md")

HEAD = """# Differences from FlexAttention

`composattn.flex_attention` takes the arguments of `torch.nn.attention.flex_attention.flex_attention` ([torch 2.11 to
2.15](torch.md)), `BlockMask` and `return_aux` included, and returns the same.
Only the import changes. It needs no `torch.compile`. `tests/cpu/flex_conformance` holds it to torch's semantics: the
ideas of torch's tests, written again (score mods, block masks, captured tensors, gradients, lse and the largest scores,
strides, shared heads, decoding, torch's `PagedAttention`, errors). The truth there is plain attention in fp64 with
autograd. The mean error of a result and of each gradient is at most 10 times (half precision: 1.1 times) that of plain
PyTorch in the same type, plus one rounding.

Errors that torch raises too have torch's type among their bases, so `except ValueError` stays as it is.

**torch's own tests** run on our backends by `make flex-suite FOLDER=...`, from a copy of torch's `test/inductor`. What
torch compiles there calls `composattn.flex_attention`, on a CPU, with gradients. torch's plain attention is the truth;
`tests/flex_suite.py` says how. Of the suites of torch 2.6, run with torch 2.13, 1,092 of 1,125 tests are right. The
other 33:

| tests | end | why |
|---|---|---|
| 17 of biases in halves | above the error | their truth sums in halves: 0.19 off (fp16, 17 entries), ours 6e-4 |
| 3 | above the error | rounding: 8e-8 beside 0, 7.6e-7 beside 4.6e-7, 3.278e-7 beside 3.276e-7 |
| 3 of strides | another order | a dimension of 1 has no place among them |
| 7 | no error | torch's kernels refuse it: blocks of 96, two reads of a tensor that learns |
| 1 | another error | a row of 256 numbers in a mod: torch refuses it too |
| 2 | `ModShapeMismatch` | a table for 8 heads in a call of 2, see below |

Not counted are 40: they call no attention, look into code or graphs that torch generates, or need two devices.
Newer suites were not to be had as files. One of 465 cases, another's port of a later version, had 462 right at
74da48e: the other three were 8-bit q, a function of autograd with a backward of its own, and a stride order of `out`.

## What differs

| | torch | composattn | why |
|---|---|---|---|"""


def lines() -> Iterator[str]:
    yield HEAD
    for d in DIFFERENCES:
        yield f"| {d.what} | {d.torchs} | {d.ours} | {d.why} |"


def page() -> str:
    return "\n".join(lines()).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(DIFFERENCES)} differences")
