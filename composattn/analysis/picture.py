"""A mask as a dense tensor and as a picture, to look at before trusting it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .. import errors
from ..extras import how_to_install
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Capture, Dep, Expr, captures
from ..graph.linear import MOST
from .derived import refresh


def check_sizes(least: int, **sizes: Any) -> None:
    """Raises `InvalidArgument` unless all are ints of at least `least`, and none is more than the analysis follows."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise errors.InvalidArgument(f"{name} must be an int of at least {least}, got {value!r}")
        if value > MOST.get(name, value):
            raise errors.InvalidArgument(f"{name} is {value}; masks are analysed up to {MOST[name]}")


def device_of(device: torch.device | str | None, held: Sequence[Capture]) -> torch.device:
    """`device`, by default that of the captured tensors. Raises `InvalidArgument` for one that is not there."""
    if device is None:
        return held[0].tensor.device if held else torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # unknown, or torch was built without it
        raise errors.InvalidArgument(f"device is {device!r}: {str(error).partition(chr(10))[0]}") from None


def dense(
    expr: Expr,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The mask itself, bool (B|1, H|1, q_len, kv_len); a dimension it does not depend on is 1.

    `device` defaults to that of the captured tensors. S² bytes per (b, h): for looking and testing, not for computing.
    """
    check_sizes(0, q_len=q_len, kv_len=kv_len)
    check_sizes(1, batch=batch, heads=heads)
    held = captures(expr)
    refresh(held)
    device = device_of(device, held)
    b = batch if expr.deps & Dep.B else 1
    h = heads if expr.deps & Dep.H else 1

    def axis(n: int, *shape: int) -> torch.Tensor:
        return torch.arange(n, device=device).view(shape)

    index: dict[str, torch.Tensor | int] = {
        "b": axis(b, -1, 1, 1, 1),
        "h": axis(h, 1, -1, 1, 1),
        "q": axis(q_len, 1, 1, -1, 1),
        "kv": axis(kv_len, 1, 1, 1, -1),
        "q_len": torch.tensor(q_len, device=device),
        "kv_len": torch.tensor(kv_len, device=device),
    }
    env = Env(index, device=device, float_dtype=torch.float32)
    try:
        return evaluate(expr, env).expand(b, h, q_len, kv_len)
    except (MemoryError, RuntimeError) as error:  # CPU and CUDA allocators say it in words of their own
        if "memory" not in str(error).lower():
            raise
        gigabytes = b * h * q_len * kv_len / 2**30
        raise errors.InvalidArgument(
            f"a dense mask of {b} x {h} x {q_len} x {kv_len} takes {gigabytes:.3g} GiB and as much again while it is "
            "made, more than there is; look at .tiles(...), which needs memory per tile, not per pair"
        ) from None


def tiles_of(visible: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """int8 (B|1, H|1, Tq, Tkv) of a dense mask: 0 empty, 1 partial, 2 full; tiles at the edges count what exists."""
    q_len, kv_len = visible.shape[-2:]
    rows, columns = -(-q_len // tile[0]), -(-kv_len // tile[1])
    padding = (0, columns * tile[1] - kv_len, 0, rows * tile[0] - q_len)

    def any_in_tile(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, padding)
        return padded.unflatten(3, (columns, tile[1])).unflatten(2, (rows, tile[0])).any(5).any(3)

    some, hidden = any_in_tile(visible), any_in_tile(~visible)
    return some.to(torch.int8) + (some & ~hidden).to(torch.int8)


def draw(
    path: str | os.PathLike[str],
    visible: torch.Tensor,
    tiles: torch.Tensor | None = None,
    tile: tuple[int, int] = (128, 128),
    title: str = "",
) -> None:
    """Save the first (b, h) of a dense mask, with its tiles (0 empty, 1 partial, 2 full) shaded, as an image.

    Raises: `MissingDependency` without matplotlib.
    """
    plt = pyplot()
    pairs = visible[0, 0].cpu()
    q_len, kv_len = pairs.shape
    figure, axes = plt.subplots(figsize=(5.0, 5.0 * max(0.4, min(2.0, q_len / kv_len)) + 0.6), dpi=150)
    shade = pairs.to(torch.float32) * 0.9
    if tiles is not None:
        kinds = tiles[0, 0].cpu().repeat_interleave(tile[0], 0)[:q_len].repeat_interleave(tile[1], 1)[:, :kv_len]
        shade = shade + torch.tensor([0.0, 0.12, 0.06])[kinds.long()]
    axes.imshow(1 - shade, cmap="gray", vmin=0, vmax=1, extent=(0, kv_len, q_len, 0), interpolation="nearest")
    if tiles is not None and max(q_len / tile[0], kv_len / tile[1]) <= 64:
        for row in range(0, q_len, tile[0]):
            axes.axhline(row, color="tab:blue", linewidth=0.3)
        for column in range(0, kv_len, tile[1]):
            axes.axvline(column, color="tab:blue", linewidth=0.3)
    axes.set(xlabel="kv", ylabel="q", title=title)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib's, drawing to files. Raises: `MissingDependency`."""
    try:
        import matplotlib
    except ImportError as error:
        raise errors.MissingDependency(
            f"picture() draws with matplotlib, which is not installed; `{how_to_install('plot')}`, "
            "or look at .dense(...) and .tiles(...), which need nothing"
        ) from error
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt
