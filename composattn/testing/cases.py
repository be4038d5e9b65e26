"""Random attention calls: shapes, dtypes, masks, score mods and their combinations, all from one stream of choices.

The choices come from a `random.Random`: of a seed (`random_case(seed)`, cheap, repeatable) or hypothesis's
(`composattn.testing.strategies`, which also shrinks what fails).

Masks compare integers only, or captured floats exactly, and score mods have kinks but no jumps: what a mod means is
then the same in fp32 and fp64, and an error is an error.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from .. import mods
from ..call.block_sparse import BlockSparse
from ..call.eight_bits import EIGHT_BITS, narrowed
from ..call.scales import Rows, rows_of
from ..mods.mask import Mask
from ..mods.score import Score
from .packed import draw_paged, draw_varlen
from .site import SMALL, Site, Space, draw_site, site_of
from .tolerance import Case, describe


def random_case(seed: int, space: Space = SMALL) -> Case:
    """The case of a seed: the same in every run, on every device."""
    return draw_case(random.Random(seed), space)


Drawn = tuple[Case, list[str]]  # a case with something more or not, and the words for it


def _sinks_of_some(choices: random.Random, site: Site, case: Case) -> Drawn:
    if choices.randint(0, 4):
        return case, []
    return dataclasses.replace(case, sinks=site.table(site.heads, size=2.0)), ["sinks"]


def _dropout_of_some(choices: random.Random, site: Site, case: Case) -> Drawn:
    if choices.randint(0, 5):
        return case, []
    dropout = choices.choice((0.1, 0.5, 0.9)), choices.randint(0, 2**63 - 1)
    return dataclasses.replace(case, dropout=dropout), [f"dropout {dropout}"]


def _sinks_far_away(choices: random.Random, site: Site, case: Case) -> Drawn:
    if case.sinks is None or not choices.randint(0, 1):
        return case, []
    away = choices.choice((1, -1)) * choices.choice(DROPS[site.dtype])
    sinks = (case.sinks.detach() + away).requires_grad_(case.sinks.requires_grad)
    return dataclasses.replace(case, sinks=sinks), [f"of {away:+g}"]


def _light_keys_of_some(choices: random.Random, site: Site, case: Case) -> Drawn:
    if choices.randint(0, 7):
        return case, []
    case, label = _with_light_keys(site, case)
    return case, [label]


def draw_case(choices: random.Random, space: Space = SMALL) -> Case:
    """A case decided by `choices`. q, k, v are N(0,1) + N(0,10²)·Bernoulli(0.001), dout and dlse N(0,1).

    One of eight has first keys that weigh little beside the others, and half of the sinks are far from the scores.
    """
    site = draw_site(choices, space)
    dim, v_dim = choices.choice(space.head_dims), choices.choice(space.head_dims)
    if choices.randint(0, 2):
        v_dim = dim
    layout = space.layouts[0] if len(space.layouts) == 1 else choices.choice(space.layouts)
    case = {"dense": _dense_case, "varlen": draw_varlen, "paged": draw_paged}[layout](site, dim, v_dim)
    mask = draw_mask(site) if choices.randint(0, 4) else None
    score = draw_score(site) if choices.randint(0, 3) else None
    if choices.randint(0, 9) == 0:
        score = _hiding(score)
    scale = choices.choice((None, None, 0.1, 0.5))
    flows = choices.choice(("both", "both", "out", "lse")) if space.gradients else "none"
    case = dataclasses.replace(
        case,
        score_mod=score,
        mask_mod=mask,
        scale=scale,
        dout=case.dout if flows in ("both", "out") else None,
        dlse=case.dlse if flows in ("both", "lse") else None,
    )
    parts = [x.name for x in (mask, score) if x is not None] or ["plain"]
    for drawn in (_sinks_of_some, _dropout_of_some, _sinks_far_away, _light_keys_of_some):
        case, words = drawn(choices, site, case)
        parts += words
    if space.eight_bits and choices.randint(0, 1):
        case, flows = with_eight_bits(site, case), "none"
        parts.append(_scales(case))
    parts.append(describe(case))
    parts += [f"through {flows} only"] * (flows in ("out", "lse"))
    return dataclasses.replace(case, name=", ".join(parts))


DROPS = {torch.float16: (5.0,), torch.bfloat16: (5.0, 8.0), torch.float32: (8.0, 14.0), torch.float64: (14.0, 30.0)}
"""By how much lighter keys score lower, or sinks are above or below: e^drop times V must not leave the dtype's range.

Every head's sinks together, as errors count by the largest one of a whole tensor.
"""


def _hiding(score: Any) -> Any:
    """A mask in the old style; last, because what follows must not see the infinity."""
    return HIDING if score is None else score >> HIDING


def _scales(case: Case) -> str:
    return f"scales {[tuple(s.shape) if isinstance(s, torch.Tensor) else s for s in case.scales]}"


def _with_light_keys(site: Site, case: Case) -> tuple[Case, str]:
    """The case with its first keys lower by so much that they weigh little, and in dense calls with larger values.

    So a weight that is right beside 1 and wrong beside itself is far off in the output.
    """
    drop = site.choices.choice(DROPS[site.dtype])
    count = site.choices.randint(1, site.kv_len)
    lower = Score.of(lambda score, b, h, q, kv: torch.where(kv < count, score - drop, score))
    score = lower if case.score_mod is None else Score.of(case.score_mod) >> lower
    case = dataclasses.replace(case, score_mod=score)
    if case.varlen is None and case.paged is None and site.choices.randint(0, 1):
        values = case.v.clone()
        values[:, :, :count] *= 2.0 ** round(drop / math.log(2.0))
        case = dataclasses.replace(case, v=values)
    return case, f"the first {count} keys lower by {drop:g}"


def _dense_case(site: Site, dim: int, v_dim: int) -> Case:
    batch, heads, kv_heads = site.batch, site.heads, site.kv_heads
    q = site.activations(batch, heads, site.q_len, dim)
    k = site.activations(batch, kv_heads, site.kv_len, dim)
    v = site.activations(batch, kv_heads, site.kv_len, v_dim)
    dout = site.normal(batch, heads, site.q_len, v_dim).to(site.dtype)
    return Case(q, k, v, dout=dout, dlse=site.normal(batch, heads, site.q_len))


def make_case(
    seed: int,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 64,
    kv_len: int | None = None,
    dim: int = 32,
    v_dim: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradients: bool = True,
) -> Case:
    """A case for mods of your own: tensors of a seed, as in `draw_case`, of the shapes that you give.

    q (batch, heads, q_len, dim), k (batch, kv_heads, kv_len, dim), v (batch, kv_heads, kv_len, v_dim); what is left
    out is that of q.
    """
    site = site_of(seed, batch, heads, kv_heads or heads, q_len, kv_len or q_len, dtype, device)
    case = _dense_case(site, dim, v_dim or dim)
    case = dataclasses.replace(case, score_mod=score_mod, mask_mod=mask_mod, scale=scale)
    return case if gradients else case.without_gradients()


# --- masks ---------------------------------------------------------------------------------------------------


def draw_mask(site: Site, depth: int = 2) -> Mask:
    """A random mask: ready ones, plain functions, captured tensors, and `& | ~` of them."""
    if depth and site.choices.randint(0, 2) == 0:
        sign = site.choices.choice(("&", "&", "|", "~"))
        mask = draw_mask(site, depth - 1)
        if sign == "~":
            return ~mask
        return mask & draw_mask(site, depth - 1) if sign == "&" else mask | draw_mask(site, depth - 1)
    return site.choices.choice(MASKS)(site)


def _width(site: Site) -> int:
    return site.choices.randint(0, max(site.q_len, site.kv_len))


def _window(site: Site) -> Mask:
    left: Any = site.choices.choice((_width(site), (_width(site), _width(site)), (None, _width(site))))
    return mods.sliding_window(left, align=site.choices.choice(("top_left", "bottom_right")))


def _prefix(site: Site) -> Mask:
    prefix: Any = site.choices.choice((_width(site), site.integers(0, site.kv_len, site.batch)))
    return mods.prefix_lm(prefix)


def _documents(site: Site) -> Mask:
    by_batch = (site.batch,) if site.choices.randint(0, 1) else ()
    last = site.choices.randint(0, 4)
    rows, columns = site.integers(0, last, *by_batch, site.q_len), site.integers(0, last, *by_batch, site.kv_len)
    if site.choices.randint(0, 2):
        rows, columns = rows.sort(-1).values, columns.sort(-1).values
    return mods.document(rows, columns.to(rows.dtype))


def _packed(site: Site) -> Mask:
    if site.q_len != site.kv_len:
        return _documents(site)
    cuts = sorted({0, site.q_len, *(site.choices.randint(0, site.q_len) for _ in range(site.choices.randint(0, 4)))})
    offsets = torch.tensor(cuts, device=site.space.device)
    return site.choices.choice((mods.shared_prefix(offsets), mods.document(offsets=offsets)))


def _global(site: Site) -> Mask:
    sides = site.choices.choice(("both", "keys", "queries"))
    return mods.global_tokens(site.choices.randint(0, min(site.q_len, site.kv_len)), sides=sides)


def _padding(site: Site) -> Mask:
    if site.choices.randint(0, 1):
        return mods.padding(site.integers(0, site.kv_len, site.batch))
    return mods.padding(site.integers(0, 1, site.batch, site.kv_len).bool())


def _neighborhood(site: Site) -> Mask:
    rows = next(n for n in (8, 7, 4, 3, 2, 1) if site.q_len % n == 0)
    shape = (rows, site.q_len // rows)
    if site.q_len != site.kv_len:
        return _window(site)
    return mods.neighborhood(shape, [site.choices.randint(1, n) for n in shape])


def _table(site: Site) -> Mask:
    table = site.integers(0, 2, site.q_len, site.kv_len).bool()
    return Mask.of(lambda b, h, q, kv: table[q, kv], "table")


def _table_by_head(site: Site) -> Mask:
    table = site.integers(0, 2, site.batch, site.heads, site.q_len, site.kv_len).bool()
    return Mask.of(lambda b, h, q, kv: table[b, h, q, kv], "table by head")


def _noise(site: Site) -> Mask:
    rows, columns = site.normal(site.q_len), site.normal(site.heads, site.kv_len)
    return Mask.of(lambda b, h, q, kv: rows[q] >= columns[h, kv], "noise")


def _blocks(site: Site) -> Mask:
    rows, columns = (16 * site.choices.randint(1, 3) for _ in range(2))
    lead = (site.choices.choice((1, site.batch)), site.choices.choice((1, site.heads)))
    kinds = site.integers(0, 2, *lead, -(-site.q_len // rows), -(-site.kv_len // columns)).to(torch.int8)
    partial = draw_mask(site, depth=0) if site.choices.randint(0, 1) else None
    return BlockSparse(kinds, (rows, columns), partial=partial)


def _plain_mask(site: Site) -> Mask:
    n, m = site.choices.randint(1, 9), site.choices.randint(1, 9)
    functions: dict[str, Callable[..., Any]] = {
        f"(q - kv) % {n} != 0": lambda b, h, q, kv: (q - kv) % n != 0,
        f"(7 q + 13 kv + h) % {n + 1} != 0": lambda b, h, q, kv: (7 * q + 13 * kv + h) % (n + 1) != 0,
        f"|q - kv| <= {n}": lambda b, h, q, kv: torch.abs(q - kv) <= n,
        f"q // {n} >= kv // {m}": lambda b, h, q, kv: q // n >= kv // m,
        f"(q - kv) // {n} < {m} - h": lambda b, h, q, kv: (q - kv) // n < m - h,
        f"q < {n} ? kv <= {m} : q >= kv": lambda b, h, q, kv: torch.where(q < n, kv <= m, q >= kv),
        f"q ^ kv < {n}": lambda b, h, q, kv: (q ^ kv) < n,
        f"clamp(q - {n}, 0) <= kv": lambda b, h, q, kv: (q - n).clamp(min=0) <= kv,
        f"max(q, kv) < {4 * n}": lambda b, h, q, kv: torch.maximum(q, kv) < 4 * n,
        "b + h < kv": lambda b, h, q, kv: b + h < kv,
        "2 kv > q": lambda b, h, q, kv: 2 * kv > q,
        "nothing": lambda b, h, q, kv: q < 0,
    }
    name = site.choices.choice(list(functions))
    return Mask.of(functions[name], name)


MASKS: tuple[Callable[[Site], Mask], ...] = (
    lambda site: mods.causal(),
    lambda site: mods.causal("bottom_right"),
    _window,
    lambda site: mods.sliding_window(site.integers(0, site.kv_len, site.heads)),
    _prefix,
    _documents,
    _packed,
    lambda site: mods.block_diagonal(site.choices.randint(1, 9), site.choices.randint(1, 9)),
    lambda site: mods.chunked(site.choices.randint(1, 9), site.choices.choice((0, 1, None))),
    lambda site: mods.dilated_window(_width(site), site.choices.randint(1, 4)),
    _global,
    _padding,
    _neighborhood,
    _table,
    _table_by_head,
    _noise,
    _blocks,
    _plain_mask,
    _plain_mask,
    _plain_mask,
)
"""One way each to draw a mask."""


# --- score mods ----------------------------------------------------------------------------------------------


def draw_score(site: Site, depth: int = 2) -> Score:
    """A random score mod: ready ones, plain functions that read captured tensors, and `>>` and `+` of them."""
    if depth and site.choices.randint(0, 2) == 0:
        first, second = draw_score(site, depth - 1), draw_score(site, depth - 1)
        return first >> second if site.choices.randint(0, 1) else first + second
    return site.choices.choice(SCORES)(site)


def _alibi(site: Site) -> Score:
    symmetric = bool(site.choices.randint(0, 1))
    if site.choices.randint(0, 1):
        return mods.alibi(site.heads, symmetric=symmetric)
    return mods.alibi(site.table(site.heads, size=0.1), symmetric=symmetric)


def _relative(site: Site) -> Score:
    by_head = (site.heads,) if site.choices.randint(0, 1) else ()
    if site.choices.randint(0, 1):
        return mods.relative_bias(site.table(*by_head, 2 * site.choices.randint(0, site.kv_len) + 1))
    return mods.relative_bias(site.table(*by_head, site.choices.randint(1, site.q_len)), bidirectional=False)


def _t5(site: Site) -> Score:
    buckets = 2 * site.choices.randint(2, 8)
    table = site.table(buckets, site.heads)
    return mods.t5_bucket_bias(table, max_distance=buckets + 9, bidirectional=bool(site.choices.randint(0, 1)))


def _bias(site: Site) -> Score:
    full = (site.batch, site.heads, site.q_len, site.kv_len)
    shared = tuple(1 if site.choices.randint(0, 2) == 0 else n for n in full)
    return mods.bias(site.table(*shared[site.choices.randint(0, 2) :]))


CURVES: dict[str, Callable[..., Any]] = {
    "|score|": lambda score, b, h, q, kv: torch.abs(score),
    "relu(score)": lambda score, b, h, q, kv: torch.relu(score),
    "score clamped": lambda score, b, h, q, kv: score.clamp(-2.5, 3.5),
    "score * sigmoid(score)": lambda score, b, h, q, kv: score * torch.sigmoid(score),
    "log1p(exp(-|score|))": lambda score, b, h, q, kv: torch.log1p(torch.exp(-torch.abs(score))),
    "erf(score)": lambda score, b, h, q, kv: 4 * torch.erf(score / 2),
    "sin(score) + score": lambda score, b, h, q, kv: torch.sin(score) + score,
    "score / sqrt(1 + score²)": lambda score, b, h, q, kv: score * torch.rsqrt(1 + score**2) * 3,
}


def _plain_score(site: Site) -> Score:
    """A user's function: one change of the score, by a number that depends on positions and captured tensors."""
    label, amount = site.choices.choice(AMOUNTS)(site)
    changes: dict[str, Callable[..., Any]] = {
        f"score + {label}": lambda score, b, h, q, kv: score + amount(b, h, q, kv),
        f"score - {label}": lambda score, b, h, q, kv: score - amount(b, h, q, kv),
        f"score * (1 + {label} / 4)": lambda score, b, h, q, kv: score * (1 + amount(b, h, q, kv) / 4),
        f"score * sigmoid({label})": lambda score, b, h, q, kv: score * torch.sigmoid(amount(b, h, q, kv)),
        f"max(score, {label})": lambda score, b, h, q, kv: torch.maximum(score, amount(b, h, q, kv)),
        f"where(score > {label}, score, half way)": lambda score, b, h, q, kv: torch.where(
            score > amount(b, h, q, kv), score, (score + amount(b, h, q, kv)) / 2
        ),
        f"tanh(score - {label}) * 3": lambda score, b, h, q, kv: torch.tanh(score - amount(b, h, q, kv)) * 3,
        f"where(h even, score + {label}, score)": lambda score, b, h, q, kv: torch.where(
            h % 2 == 0, score + amount(b, h, q, kv), score
        ),
        **CURVES,
    }
    name = site.choices.choice(list(changes))
    return Score.of(changes[name], name)


def _read_once(site: Site) -> tuple[str, Callable[..., Any]]:
    """A captured tensor of rank 0 to 4 read at its natural positions."""
    axes = site.choices.choice(("", "h", "q", "kv", "bh", "hq", "hkv", "q kv", "h q kv", "b h q kv", "b kv"))
    names = axes.split() if " " in axes else {"bh": ["b", "h"], "hq": ["h", "q"], "hkv": ["h", "kv"]}.get(axes, [axes])
    names = [n for n in names if n]
    sizes = {"b": site.batch, "h": site.heads, "q": site.q_len, "kv": site.kv_len}
    table = site.table(*(sizes[n] for n in names))

    def amount(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = {"b": b, "h": h, "q": q, "kv": kv}
        return table[tuple(at[n] for n in names)] if names else table * 1.0

    return f"t[{', '.join(names)}]", amount


def _read_by_distance(site: Site) -> tuple[str, Callable[..., Any]]:
    table = site.table(site.q_len + site.kv_len)
    if site.choices.randint(0, 1):
        return "t[q - kv + Skv]", lambda b, h, q, kv: table[q - kv + site.kv_len]
    return "t[q - kv], from the end where negative", lambda b, h, q, kv: table[q - kv]


def _read_twice(site: Site) -> tuple[str, Callable[..., Any]]:
    n = max(site.q_len, site.kv_len)
    table = site.table(site.heads, n)
    return "t[h, q] - t[h, kv]", lambda b, h, q, kv: table[h, q] - table[h, kv]


def _gathered(site: Site) -> tuple[str, Callable[..., Any]]:
    """A read at positions that were themselves read: no pattern at all."""
    n = site.choices.randint(1, 7)
    table, kinds = site.table(n), site.integers(0, n - 1, site.q_len)
    if site.choices.randint(0, 1):
        return "t[kind[q]]", lambda b, h, q, kv: table[kinds[q]]
    return f"t[(kind[q] + 3 kv) % {n}]", lambda b, h, q, kv: table[(kinds[q] + 3 * kv) % n]


def _of_positions(site: Site) -> tuple[str, Callable[..., Any]]:
    n = site.choices.randint(2, 9)
    functions: dict[str, Callable[..., Any]] = {
        "log1p(|q - kv|)": lambda b, h, q, kv: torch.log1p(torch.abs(q - kv)),
        f"(q - kv) / {8 * n}": lambda b, h, q, kv: (q - kv) / (8 * n),
        f"sin(0.4 ((q - kv) % {n}))": lambda b, h, q, kv: torch.sin(((q - kv) % n) * 0.4),
        f"cos(kv // {n})": lambda b, h, q, kv: torch.cos((kv // n).float() * 0.3),
        f"exp(-|q - kv| / {n})": lambda b, h, q, kv: torch.exp(-torch.abs(q - kv).float() / n),
        "rsqrt(1 + q)": lambda b, h, q, kv: torch.rsqrt((q + 1).float()),
        "h - b": lambda b, h, q, kv: (h - b) * 0.25,
        f"sqrt(kv % {n})": lambda b, h, q, kv: torch.sqrt((kv % n).float()),
        "2^-h": lambda b, h, q, kv: torch.exp2(-(h + 1)),
        f"(kv - q) // {n}": lambda b, h, q, kv: ((kv - q) // n) * 0.125,
    }
    name = site.choices.choice(list(functions))
    return name, functions[name]


HIDING = Score.of(lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf")), "where(q >= kv, score, -inf)")

AMOUNTS = (_read_once, _read_once, _read_by_distance, _read_twice, _gathered, _of_positions, _of_positions)
"""One way each to draw a number that a score changes by."""

SCORES: tuple[Callable[[Site], Score], ...] = (
    _alibi,
    lambda site: mods.softcap(site.choices.choice((2.0, 7.5, 30.0))),
    _relative,
    _t5,
    _bias,
    lambda site: mods.scale_by_head(site.table(site.heads, positive=True)),
    lambda site: mods.temperature(site.table(positive=True)),
    _plain_score,
    _plain_score,
    _plain_score,
    _plain_score,
)
"""One way each to draw a score mod."""


def with_eight_bits(site: Site, case: Case) -> Case:
    """The case with k and v, or q too, rounded to 8 bits, times scales that the site draws; forward only."""
    dtype = site.choices.choice(EIGHT_BITS)
    all_three = bool(site.choices.randint(0, 1))
    scales: list[Any] = []
    for rows in rows_of(case.q, case.k, case.v, case.varlen, case.paged):
        wide = rows.name == "q" and not all_three
        scales.append(None if wide or site.choices.randint(0, 4) == 0 else _scale(site, rows))
    q, k, v = (
        x if n == 0 and not all_three else narrowed(x.float(), dtype) for n, x in enumerate((case.q, case.k, case.v))
    )
    out = case.q.dtype if all_three else None
    return dataclasses.replace(case, q=q, k=k, v=v, scales=tuple(scales), out_dtype=out, dout=None, dlse=None)


def _scale(site: Site, rows: Rows) -> torch.Tensor | float:
    """A scale of any kind whose shape can mean nothing else."""
    t, one = rows.tensor, (1,)
    heads = site.choices.choice((t.shape[1], site.kv_heads))
    kinds: dict[str, tuple[int, ...]] = {"number": (), "(1,)": one, "heads": (heads,)}
    if rows.lies == "packed":
        kinds |= {"sequences": (rows.batch, heads, 1, 1)}
        kinds |= {} if rows.name == "v" else {"rows": (t.shape[0], t.shape[1], 1)}
    elif rows.lies == "paged":
        kinds |= {"sequences": (rows.batch, heads), "rows": (*t.shape[:3], 1)}
    else:
        blocks = -(-t.shape[2] // 8)
        kinds |= {"sequences": (rows.batch, heads), "rows": (*t.shape[:3], 1), "blocks": (*t.shape[:2], blocks, 1)}
    if rows.name == "v" and rows.lies != "paged":
        kinds |= {"channels": (rows.batch, t.shape[1], 1, t.shape[-1])}
    shape = kinds[site.choices.choice(list(kinds))]
    if shape == () and site.choices.randint(0, 1):
        return 0.75
    return (0.3 * site.normal(*shape)).exp().float()
