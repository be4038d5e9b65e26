"""Random masks of every kind that the analysis knows, and some that it does not."""

from __future__ import annotations

import random

import torch

from composattn.graph.expr import Capture, DType, Expr, const, index, read
from composattn.graph.ops import apply
from composattn.graph.scalar import Scalar

_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


class RandomMask:
    """One random mask over lengths up to `longest`, with the tensors that it captures."""

    def __init__(self, seed: int, longest: int = 40, depth: int = 3) -> None:
        self.random = r = random.Random(seed)
        self.q_len, self.kv_len = r.randint(1, longest), r.randint(1, longest)
        if r.random() < 0.4:
            self.kv_len = self.q_len
        self.batch, self.heads = r.randint(1, 2), r.randint(1, 2)
        self.tile = (r.choice([1, 2, 4, 5, 8, 16]), r.choice([1, 2, 4, 8, 16]))
        self._generator = torch.Generator().manual_seed(seed)
        self._tables: dict[str, Capture] = {}
        self.expr = self._mask(r.randint(0, depth))

    # --- captured tensors ---

    def _table(self, name: str) -> Capture:
        if name not in self._tables:
            self._tables[name] = Capture(self._draw(name))
        return self._tables[name]

    def _draw(self, name: str) -> torch.Tensor:
        r, g = self.random, self._generator
        n = max(self.q_len, self.kv_len)
        dtype = r.choice([torch.int32, torch.int64, torch.int16])
        if name == "lengths":
            return torch.randint(-1, n + 2, (self.batch,), generator=g).to(dtype)
        if name == "by_head":
            return torch.randint(0, n, (self.heads,), generator=g).to(dtype)
        if name == "flags":
            return torch.rand(n, generator=g) < r.choice([0.1, 0.5, 0.9])
        if name == "grid":
            coarse = torch.rand(-(-n // 4), -(-n // 4), generator=g) < 0.5
            return coarse.repeat_interleave(4, 0).repeat_interleave(r.choice([1, 4]), 1)
        if name == "float_rows":
            return torch.randn(n, generator=g) * 10
        shape = (self.batch, n) if name.endswith("_2d") else (n,)
        values = torch.randint(0, r.choice([2, 4, n]), shape, generator=g)
        if name.startswith("starts"):
            values = torch.randint(-2, n + 2, shape, generator=g)
        if r.random() < 0.6:
            values = values.sort(-1, descending=r.random() < 0.2).values
        return values.to(dtype)

    def _row_read(self, name: str, position: Expr) -> Expr:
        lead = (index("b"),) if name.endswith("_2d") else ()
        return read(self._table(name), (*lead, position))

    # --- integers ---

    def _number(self) -> Expr:
        r = self.random
        if r.random() < 0.02:
            return const(r.choice([2**31 - 1, -(2**31) + 1, 2**30]))
        return const(r.choice([0, 1, -1, 2, 3, 5, 8, 16, -4, r.randint(-40, 40)]))

    def _runtime(self) -> Expr:
        r = self.random
        return r.choice(
            [
                lambda: read(self._table("lengths"), (index("b"),)),
                lambda: read(self._table("by_head"), (index("h"),)),
                lambda: Scalar(r.randint(-5, 30)).expr,
                lambda: index("q_len"),
                lambda: index("kv_len"),
                lambda: index("b"),
                lambda: index("h"),
                self._number,
                self._number,
            ]
        )()

    def _of(self, leaf: Expr, depth: int) -> Expr:
        """An integer expression of one position."""
        r = self.random
        if depth <= 0 or r.random() < 0.35:
            return leaf
        x = self._of(leaf, depth - 1)
        kind = r.randrange(13)
        if kind == 0:
            return apply("floordiv", x, const(r.choice([1, 2, 3, 4, 8])))
        if kind == 1:
            return apply("mod", x, const(r.choice([1, 2, 3, 5, 8])))
        if kind == 2:
            return apply("abs", x)
        if kind in (3, 4):
            return apply(r.choice(["maximum", "minimum", "clamp_min", "clamp_max"]), x, self._runtime())
        if kind == 5:
            return apply("mul", x, const(r.choice([2, 3, -1, -2, 0])))
        if kind == 6:
            return apply("sub", x, apply("mod", x, const(r.choice([2, 4, 8]))))
        if kind == 7:
            name = r.choice(["starts", "starts_2d", "ids", "ids_2d"])
            clamped = apply("clamp_min", x, const(0)) if r.random() < 0.8 else x
            return self._row_read(name, apply("clamp_max", clamped, const(10)) if r.random() < 0.3 else clamped)
        if kind == 8:
            return apply("where", self._compare(leaf, depth - 1), x, self._runtime())
        if kind == 9:
            return apply(r.choice(["rshift", "truncdiv", "fmod"]), x, const(r.choice([1, 2, 3])))
        if kind == 10:
            return apply(r.choice(["floordiv", "mod", "truncdiv", "fmod"]), x, const(r.choice([-1, -2, -3, -8])))
        if kind == 11:
            return apply(r.choice(["xor", "or", "and"]), x, const(r.choice([1, 3, 5, 8, -8])))
        return apply(r.choice(["add", "sub"]), x, self._runtime())

    def _compare(self, leaf: Expr, depth: int) -> Expr:
        return apply(self.random.choice(_COMPARE), self._of(leaf, depth), self._runtime())

    # --- masks ---

    def _atom(self) -> Expr:
        r = self.random
        q, kv = index("q"), index("kv")
        kind = r.randrange(13)
        if kind == 12:
            places = [q, kv, self._of(q, 1), self._of(kv, 1), apply("sub", q, kv), index("b")]
            return read(self._table("grid"), (r.choice(places), r.choice(places)))
        if kind <= 2:
            x, y = self._of(q, 2), self._of(kv, 2)
            if r.random() < 0.5:
                x = apply(r.choice(["add", "sub"]), x, self._runtime())
            return apply(r.choice(_COMPARE), *((x, y) if r.random() < 0.5 else (y, x)))
        if kind == 3:
            distance = apply("sub", q, kv) if r.random() < 0.5 else apply("sub", kv, q)
            return apply(r.choice(_COMPARE), self._of(distance, 2), self._runtime())
        if kind == 4:
            return self._compare(r.choice([q, kv]), 2)
        if kind == 5:
            name = r.choice(["ids", "ids_2d"])
            other = r.choice(["ids", "ids_2d", name, name])
            op = r.choice(["eq", "eq", "ne", *_COMPARE])
            row = self._row_read(name, q) if r.random() < 0.9 else self._number()
            pair = (row, self._row_read(other, kv))
            return apply(op, *(pair if r.random() < 0.5 else pair[::-1]))
        if kind == 6:
            return self._row_read("flags", r.choice([q, kv, kv]))
        if kind == 7:
            size = r.choice([2, 4, 5, 8])
            return apply(
                "eq", apply("floordiv", q, const(size)), apply("floordiv", kv, const(r.choice([size, size, 3])))
            )
        if kind == 8:
            n = const(r.choice([2, 3, 5]))
            distance = apply("sub", q, kv)
            return apply("eq", apply("mod", distance, n), const(r.choice([0, 0, 1, 7])))
        if kind == 9:
            return self._float_atom()
        if kind == 10:
            return apply(
                r.choice(_COMPARE), apply("cast_float", apply("sub", q, kv)), const(r.choice([2.0, 3.5, -1.0, 0.3]))
            )
        return apply("le", kv, q)

    def _float_atom(self) -> Expr:
        r = self.random
        q, kv = index("q"), index("kv")
        x: Expr = r.choice([q, kv, apply("sub", q, kv), apply("mul", q, kv)])
        for _ in range(r.randint(0, 3)):
            name = r.choice(
                [
                    "neg",
                    "abs",
                    "tanh",
                    "exp",
                    "sqrt",
                    "log",
                    "sin",
                    "sigmoid",
                    "floor",
                    "erf",
                    "add",
                    "mul",
                    "div",
                    "read",
                ]
            )
            if name in ("add", "mul", "div"):
                x = apply(name, x, r.choice([const(0.3), const(-1.7), const(7.0), apply("cast_float", kv)]))
            elif name == "read":
                x = apply("add", x, self._row_read("float_rows", r.choice([q, kv])))
            else:
                x = apply(name, apply("cast_float", x) if x.dtype is not DType.FLOAT else x)
        y = r.choice([const(0.5), const(4.0), apply("cast_float", q), apply("sqrt", apply("cast_float", q))])
        return apply(r.choice(_COMPARE), x, y)

    def _mask(self, depth: int) -> Expr:
        r = self.random
        if depth == 0:
            return self._atom()
        kind = r.randrange(10)
        if kind < 4:
            return apply("and", self._mask(depth - 1), self._mask(depth - 1))
        if kind < 7:
            return apply("or", self._mask(depth - 1), self._mask(depth - 1))
        if kind == 7:
            return apply("not", self._mask(depth - 1))
        if kind == 8:
            return apply(r.choice(["xor", "eq", "ne"]), self._mask(depth - 1), self._mask(depth - 1))
        return apply("where", self._mask(0), self._mask(depth - 1), self._mask(depth - 1))
