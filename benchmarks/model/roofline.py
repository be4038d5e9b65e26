"""What a tile must cost whatever the code is: products, operands from shared memory, exponentials, by its shape alone.

FlashAttention-4 (2026), sections 3.1.1 and 3.2.1, whose tables 1 and 3 these formulas give. A product of the matrix
unit is 128 x 128 at most, and each reads its operands again: both from shared memory, or the right one alone where the
left one lies in tensor memory. Of a pair of SMs each reads half of the right one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from benchmarks.model.clocks import Clocks

SIDE = 128  # rows and columns of a product
ELEMENT = 2  # bytes of bf16


@dataclasses.dataclass(frozen=True)
class Product:
    """m x k times k x n; `left`: where its left operand lies. `paired`: half of the right one is the neighbour's."""

    m: int
    n: int
    k: int
    left: Literal["shared", "tensor"] = "shared"
    paired: bool = False

    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    def read(self) -> float:
        """Bytes of shared memory."""
        down, across = max(1.0, self.m / SIDE), max(1.0, self.n / SIDE)
        left = self.m * self.k * across if self.left == "shared" else 0.0
        right = self.n * self.k * down / (2 if self.paired else 1)
        return ELEMENT * (left + right)


def cycles(products: Iterable[Product], exponentials: int, clocks: Clocks, moved: float = 0.0) -> dict[str, float]:
    """Clocks of the tensor core, of shared memory (`moved`: bytes beside operands), and of the exponential unit."""
    made = list(products)
    return {
        "matrix": sum(p.operations() for p in made) / clocks.matrix,
        "shared": (sum(p.read() for p in made) + moved) / clocks.shared,
        "exp": exponentials / clocks.exp,
    }


def forward(m: int, n: int, d: int, dv: int, clocks: Clocks, paired: bool = False) -> dict[str, float]:
    """A tile of m queries x n keys: scores from shared memory, then P, which lies in tensor memory, times V."""
    products = Product(m, n, d, paired=paired), Product(m, dv, n, "tensor", paired)
    return cycles(products, m * n, clocks)


def backward(
    m: int, n: int, d: int, clocks: Clocks, paired: bool = False, dv: int | None = None, transposed: bool = False
) -> dict[str, float]:
    """A tile of m queries x n keys of one SM: S, dP, dV, dK, dQ; see `backward_rows`."""
    rows = backward_rows(m, n, d, clocks, paired, dv, transposed)
    shared = sum(rows[name] for name in ("operands", "dS", "exchange", "dQ"))
    return {"matrix": rows["matrix"], "shared": shared, "exp": rows["exp"]}


def backward_rows(
    m: int, n: int, d: int, clocks: Clocks, paired: bool = False, dv: int | None = None, transposed: bool = False
) -> dict[str, float]:
    """Clocks by what they are for: shared memory has operands, dS (written), its exchange, dQ (written and read).

    With `paired` each of two SMs has half of the rows of dQ over twice the keys, for which it sends half of
    dS to the other and receives as much: a tile's worth is written in all, and half as much is read. `transposed`: sums
    with columns of dK and dV as rows, `SIDE` a product, where P comes from shared memory as dS does; both of it: see
    `_by_queries`.
    """
    dv = d if dv is None else dv
    if paired and transposed:
        return _by_queries(m, n, d, dv, clocks)
    scores = [Product(n, m, width, paired=paired) for width in (d, dv)]
    if transposed:
        of_keys = [Product(-(-width // SIDE) * SIDE, n, m) for width in (d, dv)]
    else:
        of_keys = [Product(n, width, m, "tensor", paired) for width in (d, dv)]
    of_queries = Product(m // 2, d, 2 * n, paired=True) if paired else Product(m, d, n)
    made, ds, dq = [*scores, *of_keys, of_queries], m * n * ELEMENT, 2 * m * d * 4
    found = cycles(made, m * n, clocks)
    return {
        "matrix": found["matrix"],
        "operands": found["shared"],
        "dS": (2 if transposed else 1) * ds / clocks.shared,
        "exchange": 1.5 * ds / clocks.shared if paired else 0.0,
        "dQ": (dq / 2 if paired else dq) / clocks.shared,
        "exp": found["exp"],
    }


def _by_queries(m: int, n: int, d: int, dv: int, clocks: Clocks) -> dict[str, float]:
    """By two SMs with half of 2n keys of m queries each, where a product has half of the queries as rows,
    or half of the columns of dK or dV.

    Each writes P and dS of its queries, half of it into the other's shared memory: that half is counted as it leaves
    and as it arrives. dQ is added from registers, and passes once.
    """
    queries, keys, moved = m // 2, 2 * n, m * n * ELEMENT
    products = [
        *(Product(queries, keys, width, paired=True) for width in (d, dv)),
        *(Product(width // 2, keys, m, paired=True) for width in (d, dv)),
        Product(queries, d, keys, "tensor", paired=True),
    ]
    found = cycles(products, m * n, clocks)
    return {
        "matrix": found["matrix"],
        "operands": found["shared"],
        "dS": 2 * moved / clocks.shared,
        "exchange": 2 * moved / 2 / clocks.shared,
        "dQ": queries * d * 4 / clocks.shared,
        "exp": found["exp"],
    }
