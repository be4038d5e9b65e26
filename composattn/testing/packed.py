"""Cases of packed sequences and of keys in pages; what no sequence uses is NaN, so that a read of it shows.

    case = make_varlen_case(0, [100, 0, 37], heads=8, kv_heads=2, mask_mod=causal())
    check(partial(composattn.attention, backend="hopper"), case)

    check(composattn.attention, make_paged_case(0, [1000, 17], page_size=64, q_len=1, heads=8, kv_heads=2))

`random_case` draws such cases in a `Space` whose `layouts` name them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call.sequences import Paged, Varlen
from .site import Site, site_of
from .tolerance import Case

PAGE_SIZES = (16, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class PackedLengths:
    """Where sequences lie: `lengths` rows each, of which the first `used` count (None: all)."""

    lengths: Sequence[int]
    used: Sequence[int] | None = None

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def counts(self) -> Sequence[int]:
        return self.lengths if self.used is None else self.used

    def offsets(self, device: str | torch.device) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)

    def used_tensor(self, device: str | torch.device) -> torch.Tensor | None:
        return None if self.used is None else torch.tensor(self.used, dtype=torch.int32, device=device)

    def poison(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """`x` with NaN in the rows (of `dim`) that no sequence uses."""
        unused = torch.ones(self.total, dtype=torch.bool)
        start = 0
        for length, count in zip(self.lengths, self.counts, strict=True):
            unused[start : start + count] = False
            start += length
        shape = [1] * x.ndim
        shape[dim] = self.total
        return x.masked_fill(unused.view(shape).to(x.device), torch.nan)


def make_varlen_case(
    seed: int,
    q_lens: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    *,
    used_q: Sequence[int] | None = None,
    used_kv: Sequence[int] | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    dim: int = 32,
    v_dim: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    gradients: bool = True,
) -> Case:
    """Packed sequences of these lengths; `kv_lens` None: the keys lie as the queries do. See `Varlen`.

    `used_q`, `used_kv`: seqused. Tensors of a seed, as in `draw_case`.
    """
    longest = max(q_lens), max(kv_lens or q_lens)
    site = site_of(seed, len(q_lens), heads, kv_heads or heads, *longest, dtype, device)
    queries, keys = PackedLengths(q_lens, used_q), None if kv_lens is None else PackedLengths(kv_lens, used_kv)
    case = varlen_case(site, queries, keys, dim, v_dim or dim)
    case = dataclasses.replace(case, score_mod=score_mod, mask_mod=mask_mod, scale=scale)
    return case if gradients else case.without_gradients()


def make_paged_case(
    seed: int,
    kv_lens: Sequence[int],
    *,
    page_size: int = 16,
    q_len: int = 1,
    q_lens: Sequence[int] | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    dim: int = 32,
    v_dim: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Case:
    """Keys in shuffled pages; `q_len` dense queries for each sequence, or packed queries of `q_lens`. See `Paged`."""
    longest = q_len if q_lens is None else max(q_lens), max(kv_lens)
    site = site_of(seed, len(kv_lens), heads, kv_heads or heads, *longest, dtype, device)
    queries = q_len if q_lens is None else PackedLengths(q_lens)
    case = paged_case(site, queries, kv_lens, page_size, dim, v_dim or dim)
    return dataclasses.replace(case, score_mod=score_mod, mask_mod=mask_mod, scale=scale)


def varlen_case(site: Site, queries: PackedLengths, keys: PackedLengths | None, dim: int, v_dim: int) -> Case:
    """A case with no mods, and gradients of both outputs; `keys` None: as the queries."""
    kv, device = keys or queries, site.space.device
    q = queries.poison(site.activations(queries.total, site.heads, dim))
    k = kv.poison(site.activations(kv.total, site.kv_heads, dim))
    v = kv.poison(site.activations(kv.total, site.kv_heads, v_dim))
    dout = queries.poison(site.normal(queries.total, site.heads, v_dim).to(site.dtype))
    dlse = queries.poison(site.normal(site.heads, queries.total), dim=1)
    varlen = Varlen(
        queries.offsets(device),
        None if keys is None else keys.offsets(device),
        seqused_q=queries.used_tensor(device),
        seqused_k=None if keys is None else keys.used_tensor(device),
        max_seqlen_q=max(queries.counts),
        max_seqlen_k=max(kv.counts),
    )
    return Case(q, k, v, dout=dout, dlse=dlse, varlen=varlen)


def paged_case(
    site: Site, queries: int | PackedLengths, kv_lens: Sequence[int], page_size: int, dim: int, v_dim: int
) -> Case:
    """A case with no mods; `queries` is how many each sequence has, or where packed ones lie."""
    device = site.space.device
    counts = [-(-n // page_size) for n in kv_lens]
    width, num_pages = max(1, max(counts)) + site.choices.randint(0, 1), sum(counts) + 1
    order = torch.randperm(num_pages, generator=site.generator).to(torch.int32)
    filler = site.choices.choice((0, -1, num_pages + 7))  # where there are no keys any page number will do
    table = torch.full((len(kv_lens), width), filler, dtype=torch.int32)
    unused = torch.ones(num_pages, page_size, dtype=torch.bool)
    start = 0
    for b, (count, length) in enumerate(zip(counts, kv_lens, strict=True)):
        table[b, :count] = order[start : start + count]
        for page in range(count):
            unused[order[start + page], : length - page * page_size] = False
        start += count

    def cache(width: int) -> torch.Tensor:
        drawn = site.activations(num_pages, page_size, site.kv_heads, width)
        return drawn.masked_fill(unused[..., None, None].to(device), torch.nan).transpose(1, 2)

    seqused = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    paged = Paged(table.to(device), page_size, seqused)
    if isinstance(queries, int):
        q = site.activations(len(kv_lens), site.heads, queries, dim)
        return Case(q, cache(dim), cache(v_dim), paged=paged)
    q = queries.poison(site.activations(queries.total, site.heads, dim))
    varlen = Varlen(queries.offsets(device), seqused_q=queries.used_tensor(device), max_seqlen_q=max(queries.counts))
    return Case(q, cache(dim), cache(v_dim), varlen=varlen, paged=paged)


# --- drawn ones ----------------------------------------------------------------------------------------------


def draw_varlen(site: Site, dim: int, v_dim: int) -> Case:
    """Lengths up to those of the site, empty ones too; seqused now and then."""
    queries = _draw_rows(site, site.q_len)
    alike = site.q_len == site.kv_len and site.choices.randint(0, 1) == 1
    return varlen_case(site, queries, None if alike else _draw_rows(site, site.kv_len), dim, v_dim)


def draw_paged(site: Site, dim: int, v_dim: int) -> Case:
    """Key lengths up to that of the site; its number of dense queries, or packed ones."""
    queries = site.q_len if site.choices.randint(0, 1) else _draw_rows(site, site.q_len)
    kv_lens = _draw_lengths(site, site.kv_len)
    return paged_case(site, queries, kv_lens, site.choices.choice(PAGE_SIZES), dim, v_dim)


def _draw_rows(site: Site, longest: int) -> PackedLengths:
    lengths = _draw_lengths(site, longest)
    used = [site.choices.randint(0, n) for n in lengths] if site.choices.randint(0, 2) == 0 else None
    return PackedLengths(lengths, used)


def _draw_lengths(site: Site, longest: int) -> list[int]:
    kinds = [site.choices.randint(0, 3) for _ in range(site.batch)]
    return [0 if kind == 0 else longest if kind == 1 else site.choices.randint(0, longest) for kind in kinds]
