"""Writes docs/mods.md from the docstrings of composattn.mods, with a picture of every mask computed from an example.

Run it from the repository: `python docs/make_mods.py`. A test compares the page with what this makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from composattn.analysis.symbolic import definition
from composattn.mods import masks, scores
from composattn.mods.mask import Mask

PAGE = Path(__file__).with_name("mods.md")
SIZE = 16

# One example each; those of masks are evaluated and drawn on 16 × 16 positions.
EXAMPLES: dict[str, list[str]] = {
    "causal": ["causal()"],
    "sliding_window": ["sliding_window((4, 2))", "causal() & sliding_window(4)"],
    "prefix_lm": ["prefix_lm(5)"],
    "document": [
        "document(offsets=torch.tensor([0, 5, 7, 16]))",
        "document(torch.arange(16) % 3) & causal()",
    ],
    "block_diagonal": ["block_diagonal(4)"],
    "chunked": ["chunked(4, left=1)", "chunked(4) & causal()"],
    "dilated_window": ["dilated_window((6, 6), 3)"],
    "global_tokens": [
        "global_tokens(2) | sliding_window((2, 2))",
        "causal() & (global_tokens(1, 'keys') | sliding_window(3))",
    ],
    "padding": ["padding(torch.tensor([11]))"],
    "neighborhood": ["neighborhood((4, 4), (3, 3))", "neighborhood((16,), 3, dilation=2)"],
    "shared_prefix": ["shared_prefix(torch.tensor([0, 5, 9, 16]))"],
    "alibi": ["alibi(8)", "alibi(torch.nn.Parameter(torch.ones(8)))"],
    "softcap": ["softcap(30.0)"],
    "relative_bias": ["relative_bias(torch.zeros(8, 2 * 64 + 1, requires_grad=True))"],
    "t5_bucket_bias": ["t5_bucket_bias(torch.nn.Embedding(32, 8).weight)"],
    "bias": ["bias(torch.randn(1, 8, 128, 128))"],
    "scale_by_head": ["scale_by_head(torch.nn.Parameter(torch.ones(8)))"],
    "temperature": ["temperature(2.0)", "softcap(30.0) >> temperature(0.5)"],
}

HEAD = """\
# Ready masks and score mods

<!-- Written by docs/make_mods.py from the docstrings: change those and run it. -->

`from composattn.mods import causal, ...`. Masks join with `&`, `|`, `~`; score mods with `>>` (then) and `+` (both
changes). A plain function may stand on either side. Pictures show 16 queries (rows) by 16 keys (columns), `■` where
a query may attend to a key, as `print(mask)` does. Notebooks show a picture of a mod
(`recipes/pictures.ipynb` is an example); formulas are what `_repr_latex_` gives: $s$ is the score, $t_n$ are captured
tensors; its derivatives, which the backward computes, are below each score mod. The [gallery](gallery.md) has
larger pictures, and speeds.

The blocks of this page run as they stand, in order, behind this one:

```python
import torch
from composattn.mods import *
```
"""


def functions(module: Any) -> list[Callable[..., Any]]:
    """The mods of a module, in the order of its source."""
    made = [f for name, f in vars(module).items() if name in EXAMPLES and callable(f)]
    return sorted(made, key=lambda f: inspect.unwrap(f).__code__.co_firstlineno)


def entry(fn: Callable[..., Any]) -> Iterator[str]:
    name = fn.__name__
    # annotations are strings until they are asked for, and would be printed with quotes
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(fn))).replace("torch.Tensor", "Tensor")
    yield f"### {name}\n"
    yield f"```text\n{name}{signature}\n```\n"
    yield f"{inspect.getdoc(fn)}\n"
    vocabulary = {**vars(masks), **vars(scores)}
    for example in EXAMPLES[name]:
        mod = eval(example, {**vocabulary, "torch": torch})
        yield f"```python\n{example}\n```\n"
        yield f"$${definition(mod.expr)}$$\n"
        if isinstance(mod, Mask):
            yield "```\n" + mod.grid(SIZE) + "\n```\n"


def page() -> str:
    parts = [HEAD]
    for title, module in (("Masks", masks), ("Score mods", scores)):
        parts.append(f"## {title}\n")
        for fn in functions(module):
            parts.extend(entry(fn))
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(functions(masks))} masks, {len(functions(scores))} score mods")
