"""What is measured: every row of the result tables, as data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch

MaskMod = Callable[..., torch.Tensor]
ScoreMod = Callable[..., torch.Tensor]
Direction = Literal["forward", "backward"]
# What a row is judged by: arithmetic, bytes of K and V read, the host's own time a call, or peak extra memory.
Measure = Literal["tflops", "tbps", "host", "memory"]


@dataclass(frozen=True)
class Pattern:
    """Which pairs are visible and what happens to their score, as plain callables with FlexAttention's signature.

    The other fields say the same to implementations that take arguments instead of callables; one that has
    no argument for a pattern refuses the case.
    """

    name: str
    mask_mod: MaskMod | None = None
    score_mod: ScoreMod | None = None
    causal: bool = False
    left_window: int | None = None  # keys before the query that stay visible, with causal
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    document_starts: tuple[int, ...] = ()  # offsets of packed documents, the end included
    prefix: int = 0
    step: int = 1  # between keys of a dilated window
    grid: tuple[int, ...] = ()  # positions are those of an image of so many rows and columns, row by row
    learned: tuple[torch.Tensor, ...] = ()  # captured tensors with a gradient, which a backward has to give

    @property
    def is_plain(self) -> bool:
        """Nothing but an optional causal mask: every implementation has it."""
        windows = self.left_window, self.document_starts, self.prefix, self.step, self.grid
        return windows == (None, (), 0, 1, ()) and (self.softcap, self.alibi_slopes, self.learned) == (0.0, None, ())


PatternFactory = Callable[["Case", torch.device], Pattern]


def causal_mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return q >= kv


def full(case: Case, device: torch.device) -> Pattern:
    return Pattern("full")


def causal(case: Case, device: torch.device) -> Pattern:
    return Pattern("causal", causal_mask, causal=True)


def window(case: Case, device: torch.device, width: int = 1024) -> Pattern:
    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (q >= kv) & (q - kv < width)

    return Pattern(f"window {width}", mask, causal=True, left_window=width - 1)


def dilated(case: Case, device: torch.device, width: int = 4096, step: int = 4) -> Pattern:
    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (q >= kv) & (q - kv < width) & ((q - kv) % step == 0)

    return Pattern(f"dilated window {width} by {step}", mask, step=step)


def neighborhood(case: Case, device: torch.device, columns: int = 128, kernel: int = 7) -> Pattern:
    """The `kernel` x `kernel` positions of an image around each; at an edge they are moved inwards. The last row of
    the image may be cut."""
    rows = -(-case.q_len // columns)

    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        row = (q // columns - kernel // 2).clamp(0, rows - kernel)
        column = (q % columns - kernel // 2).clamp(0, columns - kernel)
        in_rows = (kv // columns >= row) & (kv // columns < row + kernel)
        return in_rows & (kv % columns >= column) & (kv % columns < column + kernel)

    return Pattern(f"neighborhood {rows}x{columns} {kernel}x{kernel}", mask, grid=(rows, columns))


def video(
    case: Case, device: torch.device, rows: int = 32, columns: int = 32, kernel: tuple[int, int, int] = (3, 11, 11)
) -> Pattern:
    """Frames of `rows` x `columns` positions, and the neighbourhood of each in all three axes."""
    sizes = (case.q_len // (rows * columns), rows, columns)

    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        of_q = (q // (rows * columns), q // columns % rows, q % columns)
        of_kv = (kv // (rows * columns), kv // columns % rows, kv % columns)
        seen = None
        for size, reach, at, other in zip(sizes, kernel, of_q, of_kv, strict=True):
            first = (at - reach // 2).clamp(0, size - reach)
            near = (other >= first) & (other < first + reach)
            seen = near if seen is None else seen & near
        return seen

    name = "x".join(map(str, sizes)), "x".join(map(str, kernel))
    return Pattern(f"neighborhood {name[0]} {name[1]}", mask, grid=sizes)


def alibi(case: Case, device: torch.device) -> Pattern:
    slopes = torch.exp2(-8.0 * torch.arange(1, case.heads + 1, device=device) / case.heads)

    def score(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score - slopes[h] * (q - kv)

    return Pattern("alibi", causal_mask, score, causal=True, alibi_slopes=slopes)


def relative(case: Case, device: torch.device) -> Pattern:
    """A learned bias for every head and distance; its gradient is part of the backward."""
    generator = torch.Generator().manual_seed(0)
    table = (0.1 * torch.randn(case.heads, case.q_len + case.kv_len, generator=generator)).to(device)
    table.requires_grad_(case.direction == "backward")

    def score(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + table[h, q - kv + case.kv_len]

    return Pattern("relative bias", causal_mask, score, causal=True, learned=(table,))


def pair_bias(case: Case, device: torch.device) -> Pattern:
    """A bias for every query and key, of no gradient."""
    generator = torch.Generator().manual_seed(0)
    table = (0.1 * torch.randn(case.q_len, case.kv_len, generator=generator)).to(device, torch.bfloat16)

    def score(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return score + table[q, kv]

    return Pattern("pair bias", causal_mask, score, causal=True)


def softcap(case: Case, device: torch.device, cap: float = 30.0) -> Pattern:
    def score(score, b, h, q, kv):  # type: ignore[no-untyped-def]
        return cap * torch.tanh(score / cap)

    return Pattern(f"softcap {cap:g}", causal_mask, score, causal=True, softcap=cap)


def prefix(case: Case, device: torch.device) -> Pattern:
    length = case.kv_len // 4

    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (q >= kv) | (kv < length)

    return Pattern(f"prefix {length}", mask, prefix=length)


def documents(case: Case, device: torch.device, count: int = 12) -> Pattern:
    """Packed documents of unequal length, the same in every run, causal inside each."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(case.q_len - 1, generator=generator)[: count - 1].sort().values + 1
    starts = (0, *cuts.tolist(), case.q_len)
    lengths = torch.tensor(starts).diff()
    ids = torch.repeat_interleave(torch.arange(count), lengths).to(device=device, dtype=torch.int32)

    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (ids[q] == ids[kv]) & (q >= kv)

    return Pattern(f"{count} documents", mask, causal=True, document_starts=starts)


DOCUMENT_LENGTHS = (700, 1500, 300, 2500, 1192, 1000, 500, 500)  # of 8192 tokens; of others in this proportion


def eight_documents(case: Case, device: torch.device, causal: bool = False) -> Pattern:
    """Documents of these lengths, every one seen whole from each of its positions, or up to there with `causal`."""
    starts = (0, *(end * case.q_len // sum(DOCUMENT_LENGTHS) for end in itertools.accumulate(DOCUMENT_LENGTHS)))
    counts = torch.tensor(starts).diff()
    ids = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device=device, dtype=torch.int32)

    def mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return ids[q] == ids[kv]

    def causal_mask(b, h, q, kv):  # type: ignore[no-untyped-def]
        return (ids[q] == ids[kv]) & (q >= kv)

    name = "8 causal documents" if causal else "8 documents"
    return Pattern(name, causal_mask if causal else mask, causal=causal, document_starts=starts)


def eight_causal_documents(case: Case, device: torch.device) -> Pattern:
    return eight_documents(case, device, causal=True)


@dataclass(frozen=True)
class Case:
    """One row: shapes, pattern, direction, and what it is judged by. Lengths in tokens, bf16 unless said.

    `latent`: V is the first columns of K, in the same memory. `page_size`: the keys lie in pages of so many rows, in no
    order; 0: together. `in_graph`: a CUDA graph of the
    call is replayed, as servers do where the host would be what takes the time. `deviation`: the standard deviation of
    scores; that of q, as k has 1. `trained`: scores lie as those of a trained model (`trained_scores.py`).
    """

    name: str
    sets: tuple[str, ...]
    pattern: PatternFactory
    batch: int
    heads: int
    q_len: int
    dim: int
    kv_heads: int = 0
    kv_len: int = 0
    v_dim: int = 0
    latent: bool = False
    page_size: int = 0
    in_graph: bool = False
    deviation: float = 1.0
    trained: bool = False
    direction: Direction = "forward"
    measure: Measure = "tflops"
    dtype: torch.dtype = field(default=torch.bfloat16)

    def __post_init__(self) -> None:
        for name, same_as in (("kv_heads", self.heads), ("kv_len", self.q_len), ("v_dim", self.dim)):
            object.__setattr__(self, name, getattr(self, name) or same_as)

    def flops(self, visible: int) -> int:
        """Multiplications and additions of the matrix products over `visible` (q, kv) pairs of all heads.

        Forward: QKᵀ and PV. Backward: QKᵀ again, dP = dO Vᵀ, dV = Pᵀ dO, dQ = dS K, dK = dSᵀ Q.
        """
        if self.direction == "forward":
            return 2 * visible * (self.dim + self.v_dim)
        return 2 * visible * (3 * self.dim + 2 * self.v_dim)

    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        columns = self.dim if self.latent else self.dim + self.v_dim
        return self.batch * self.kv_heads * self.kv_len * columns * self.dtype.itemsize

    def visible_pairs(self, pattern: Pattern, device: torch.device) -> int:
        """How many (b, h, q, kv) the mask lets through, counted by asking it, some rows at a time."""
        rectangle = self.q_len * self.kv_len
        if pattern.mask_mod is None:
            return self.batch * self.heads * rectangle
        # No pattern here depends on b or h: one head is counted.
        zero = torch.zeros((), dtype=torch.int64, device=device)
        kv = torch.arange(self.kv_len, device=device)
        step = max(1, 2**26 // self.kv_len)
        count = 0
        for first in range(0, self.q_len, step):
            q = torch.arange(first, min(first + step, self.q_len), device=device)[:, None]
            count += int(pattern.mask_mod(zero, zero, q, kv).sum())
        return self.batch * self.heads * count


LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
# batch, tokens, query heads, key/value heads: the last two have fewer tiles of keys than a GPU has SMs
GROUPS = ((2, 8192, 24, 3), (2, 8192, 32, 4), (1, 4096, 32, 4), (1, 4096, 16, 2))
# head dimension before them: Llama 3 8B (2024) at three lengths, 70B, gpt-oss (2025), Gemma 2 9B (2024)
OF_MODELS = (
    (128, 8, 2048, 32, 8), (128, 2, 8192, 32, 8), (128, 1, 32768, 32, 8), (128, 1, 8192, 64, 8), (64, 2, 8192, 64, 8),
    (256, 2, 8192, 16, 8),
)  # fmt: skip
DECODED = ((1, 1024), (1, 8192), (1, 131072), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (128, 1024), (128, 4096))
# of so many sequences, 8 key/value heads each, that tiles fill no rounds of 132 SMs: 0.7, 1.2 and 2.4
UNEVEN = tuple(itertools.product((12, 20, 40), ((128, 2048), (128, 8192), (64, 8192))))
HIDDEN = 2048
TOKENS = 16384


def _plain(dim: int, length: int, pattern: PatternFactory, direction: Direction, sets: tuple[str, ...]) -> Case:
    """16k tokens in all (or one sequence), hidden 2048: the shape at which peers publish their numbers."""
    return Case(
        f"{direction} D{dim} S{length} {pattern.__name__}",
        sets,
        pattern,
        batch=max(1, TOKENS // length),
        heads=HIDDEN // dim,
        q_len=length,
        dim=dim,
        direction=direction,
    )


def _grouped(
    direction: Direction, dim: int, batch: int, length: int, heads: int, kv_heads: int, pattern: PatternFactory
) -> Case:
    """Query heads that share key/value heads."""
    name = f"{direction} D{dim} B{batch} S{length} GQA {heads}/{kv_heads} {pattern.__name__}"
    return Case(name, (direction, "gqa"), pattern, batch, heads, length, dim, kv_heads=kv_heads, direction=direction)


def _modded(pattern: PatternFactory, direction: Direction, sets: tuple[str, ...], **shape: int) -> Case:
    defaults = {"batch": 2, "heads": 16, "q_len": 8192, "dim": 128} | shape
    group = f" GQA {defaults['heads']}/{shape['kv_heads']}" if "kv_heads" in shape else ""
    name = f"{direction} D{defaults['dim']} S{defaults['q_len']} {pattern.__name__}{group}"
    return Case(name, sets, pattern, direction=direction, **defaults)  # type: ignore[arg-type]


def _of_training() -> Iterable[Case]:
    """Forward and backward of long sequences."""
    for direction in ("forward", "backward"):
        for dim in (128, 64, 96, 192, 256):
            for length in LENGTHS if dim in (64, 128) else (2048, 8192):
                for pattern in (full, causal):
                    core = dim == 128 and length >= 4096 and direction == "forward"
                    yield _plain(dim, length, pattern, direction, (direction, "core") if core else (direction,))
        for pattern in (
            window, dilated, alibi, relative, pair_bias, softcap, prefix,
            documents, eight_documents, eight_causal_documents,
        ):  # fmt: skip
            core = direction == "forward" and pattern in (window, alibi, softcap)
            yield _modded(pattern, direction, (direction, "mods", "core") if core else (direction, "mods"))
        for pattern in (relative, window):
            yield _modded(pattern, direction, (direction, "mods"), heads=32, dim=64)
        if direction == "backward":
            for dim, pattern in itertools.product((64, 96), (eight_documents, eight_causal_documents)):
                yield _modded(pattern, direction, (direction, "mods"), heads=2048 // dim, dim=dim)
        for kernel in (7, 13):
            pattern = functools.partial(neighborhood, kernel=kernel)
            name = f"{direction} D128 neighborhood 128x128 {kernel}x{kernel}"
            yield Case(name, (direction, "mods"), pattern, 1, heads=16, q_len=128 * 128, dim=128, direction=direction)
        for pattern in (full, causal):
            shape = {"batch": 2, "heads": 16, "q_len": 8192, "dim": 192, "v_dim": 128}
            name = f"{direction} D192/128 S8192 {pattern.__name__}"
            yield Case(name, (direction,), pattern, direction=direction, **shape)  # type: ignore[arg-type]
        for grouped in (*((128, *group) for group in GROUPS), *OF_MODELS):
            yield _grouped(direction, *grouped, causal)
        yield _grouped(direction, 128, 2, 8192, 24, 3, full)
        # an image of FLUX.1 (2024), with its text: no whole number of rounds of 132 blocks
        name = f"{direction} D128 B1 S4608 24 heads full"
        yield Case(name, (direction,), full, batch=1, heads=24, q_len=4608, dim=128, direction=direction)
        for pattern in (window, eight_causal_documents):
            yield _modded(pattern, direction, (direction, "mods", "gqa"), heads=32, kv_heads=8)


# columns and kernel of an image, its positions (8,192 cut the last row of 96 and of 100 columns), heads, D
IMAGES = ((96, 13, 8256, 16, 128), (96, 13, 8192, 16, 128), (100, 13, 8192, 16, 128), (64, 7, 4096, 32, 64))


def _of_images() -> Iterable[Case]:
    """Neighbourhoods whose image is no 128 x 128: other widths, cut last rows, and videos of three axes."""
    for direction in ("forward", "backward"):
        for columns, kernel, length, heads, dim in IMAGES:
            pattern: PatternFactory = functools.partial(neighborhood, columns=columns, kernel=kernel)
            name = f"{direction} D{dim} image {columns} wide S{length} {kernel}x{kernel}"
            yield Case(name, ("images",), pattern, 1, heads, length, dim, direction=direction)
        for columns, frames in ((32, 8), (96, 4)):
            pattern = functools.partial(video, columns=columns)
            name = f"{direction} D128 video {frames}x32x{columns} 3x11x11"
            yield Case(name, ("images",), pattern, 1, 16, frames * 32 * columns, 128, direction=direction)


# D, batch, tokens, query heads, key/value heads
OF_DOCUMENTS = (
    (64, 2, 8192, 32, 32), (96, 2, 8192, 20, 20), (128, 8, 2048, 16, 16), (128, 1, 32768, 16, 16),
    (128, 8, 2048, 32, 4), (128, 32, 512, 16, 16),
)  # fmt: skip


def _of_segments() -> Iterable[Case]:
    """Documents by ids, which are timed beside the same documents as packed sequences."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction, shape, in_order in itertools.product(directions, OF_DOCUMENTS, (False, True)):
        dim, batch, length, heads, kv_heads = shape
        name = f"{direction} D{dim} segments B{batch} S{length} {heads}/{kv_heads} {'causal' if in_order else 'full'}"
        pattern: PatternFactory = functools.partial(eight_documents, causal=in_order)
        yield Case(name, ("segments",), pattern, batch, heads, length, dim, kv_heads=kv_heads, direction=direction)


def _of_scores_that_deviate() -> Iterable[Case]:
    """Scores further apart than those of N(0, 1), as trained models have: maxima rise for longer."""
    for dim, pattern, deviation in itertools.product((64, 96, 128, 192, 256), (full, causal), (2, 3, 6)):
        plain = _plain(dim, 8192, pattern, "forward", ("deviation",))
        name = f"forward D{dim} of deviation {deviation} S8192 {pattern.__name__}"
        yield dataclasses.replace(plain, name=name, deviation=deviation)


def _of_trained_scores() -> Iterable[Case]:
    """Scores of the heads of a trained model, in the shapes whose rows of N(0, 1) stand beside them."""
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction, dim, pattern in itertools.product(directions, (64, 96, 128, 256), (causal, full)):
        plain = _plain(dim, 8192, pattern, direction, ("trained",))
        yield dataclasses.replace(plain, name=f"trained scores: {plain.name}", trained=True)
    for direction in directions:
        plain = _modded(window, direction, ("trained",))
        yield dataclasses.replace(plain, name=f"trained scores: {plain.name}", trained=True)


def _of_both_halves() -> Iterable[Case]:
    """Both 16-bit types beside each other: a kernel's speed should not depend on which it has."""
    rows = itertools.product(("forward", "backward"), (64, 128, 256), (full, causal), (torch.bfloat16, torch.float16))
    for direction, dim, pattern, dtype in rows:
        plain = _plain(dim, 8192, pattern, direction, ("halves",))  # type: ignore[arg-type]
        yield dataclasses.replace(plain, name=f"{str(dtype).removeprefix('torch.')}: {plain.name}", dtype=dtype)


def _of_wide_heads() -> Iterable[Case]:
    """Head dimensions above 256; D 576 with Dv 512 is multi-head latent attention (DeepSeek-V2, 2024)."""
    for direction in ("forward", "backward"):
        for length, pattern in itertools.product((4096, 8192), (full, causal)):
            yield _plain(512, length, pattern, direction, ("wide",))
    latent = {"kv_heads": 1, "dim": 576, "v_dim": 512, "latent": True}
    name = "forward D576/512 S4096 GQA 16/1 causal"
    yield Case(name, ("wide",), causal, batch=1, heads=16, q_len=4096, **latent)  # type: ignore[arg-type]
    for batch, kv_len in ((1, 65536), (64, 4096), (128, 4096)):
        name = f"decode B{batch} q1 kv{kv_len} GQA 128/1 D576/512, in a graph"
        yield Case(
            name, ("wide",), full, batch, heads=128, q_len=1, kv_len=kv_len, in_graph=True, **latent  # type: ignore[arg-type]
        )  # fmt: skip


def _of_serving() -> Iterable[Case]:
    """Short sequences and single queries."""
    short = [*((1, length) for length in (128, 512, 1024)), *((16, length) for length in (128, 256, 512, 1024))]
    for dim, (batch, length) in itertools.product((64, 128), short):
        name = f"forward D{dim} B{batch} S{length} causal, in a graph"
        yield Case(name, ("graph",), causal, batch=batch, heads=HIDDEN // dim, q_len=length, dim=dim, in_graph=True)
    for dim, length, heads in ((192, 1024, 10), (256, 1024, 8), (256, 2048, 4)):
        name = f"forward D{dim} B1 S{length} {heads} heads causal, in a graph"
        yield Case(name, ("graph",), causal, batch=1, heads=heads, q_len=length, dim=dim, in_graph=True)
    for (batch, kv_len), (heads, kv_heads) in itertools.product(DECODED, ((64, 8), (40, 8))):
        name = f"decode B{batch} q1 kv{kv_len} GQA {heads}/{kv_heads} D128, in a graph"
        yield Case(
            name, ("decode grid",), full, batch, heads, q_len=1, dim=128, kv_heads=kv_heads, kv_len=kv_len,
            measure="tbps", in_graph=True,
        )  # fmt: skip
    for batch, (dim, kv_len) in UNEVEN:
        name = f"decode B{batch} q1 kv{kv_len} GQA 32/8 D{dim}, in a graph"
        yield Case(
            name, ("decode grid",), full, batch, 32, q_len=1, dim=dim, kv_heads=8, kv_len=kv_len, measure="tbps",
            in_graph=True,
        )  # fmt: skip
    for batch, kv_len in ((16, 32768), (1, 131072)):
        for page_size in (0, 16, 64, 256):
            yield Case(
                f"decode B{batch} q1 kv{kv_len} GQA 32/8 D128" + (f" pages of {page_size}" if page_size else ""),
                ("decode",),
                full,
                batch=batch,
                heads=32,
                kv_heads=8,
                q_len=1,
                kv_len=kv_len,
                dim=128,
                page_size=page_size,
                measure="tbps",
            )


def _of_the_host() -> Iterable[Case]:
    """What else a call costs: the host's time, and memory."""
    yield Case(
        "host time a call, B1 S128 H1 D64",
        ("host", "core"),
        causal,
        batch=1,
        heads=1,
        q_len=128,
        dim=64,
        measure="host",
    )
    for length in (4096, 16384, 65536):
        yield Case(
            f"extra memory S{length} window",
            ("memory", "core"),
            window,
            batch=1,
            heads=4,
            q_len=length,
            dim=128,
            measure="memory",
        )


def _of_cpus() -> Iterable[Case]:
    for pattern in (full, causal, window, documents, alibi):
        narrow = functools.partial(window, width=256) if pattern is window else pattern
        for dtype in (torch.float32, torch.bfloat16) if pattern is causal else (torch.float32,):
            name = f"forward D64 B1 H8 S2048 {pattern.__name__}, {str(dtype).removeprefix('torch.')}, on a CPU"
            yield Case(name, ("cpu",), narrow, batch=1, heads=8, q_len=2048, dim=64, dtype=dtype)
    # Small enough for a laptop; shows that the harness runs, says nothing about speed.
    for direction in ("forward", "backward"):
        for pattern in (causal, window, alibi, documents):
            shape = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 512, "dim": 32}
            narrow = functools.partial(window, width=128) if pattern is window else pattern
            yield Case(
                f"smoke {direction} {pattern.__name__}",
                ("smoke",),
                narrow,
                direction=direction,  # type: ignore[arg-type]
                dtype=torch.float32,
                **shape,  # type: ignore[arg-type]
            )


CASES: tuple[Case, ...] = tuple(
    itertools.chain(
        _of_training(),
        _of_images(),
        _of_segments(),
        _of_scores_that_deviate(),
        _of_trained_scores(),
        _of_both_halves(),
        _of_wide_heads(),
        _of_serving(),
        _of_the_host(),
        _of_cpus(),
    )
)
SETS: tuple[str, ...] = (
    "core",
    "forward",
    "backward",
    "mods",
    "gqa",
    "images",
    "segments",
    "deviation",
    "trained",
    "halves",
    "wide",
    "decode",
    "decode grid",
    "graph",
    "host",
    "memory",
    "cpu",
    "smoke",
)


def select(sets: Iterable[str], only: str | None = None) -> list[Case]:
    """The cases of any of the sets ("all": every case but the smoke ones) whose name the expression finds."""
    wanted = set(sets)
    chosen = [c for c in CASES if wanted & set(c.sets) or ("all" in wanted and "smoke" not in c.sets)]
    return [c for c in chosen if only is None or re.search(only, c.name)]
