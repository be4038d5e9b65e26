"""The mods that the tests combine: plain functions of a score and positions, as users of torch write them."""

from __future__ import annotations

import math
from typing import Any

import torch


def identity(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score


def doubled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 2 * score


def squared(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * score


def distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + (q - kv)


def slopes(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + (kv - q) * torch.exp2(-2.0 * (h + 1))


def only_past(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv <= q, score, -math.inf)


def only_future(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv >= q, score, -math.inf)


def past_by_distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv <= q, score + (q - kv), float("-inf"))


# the eight that torch runs in every dtype
BASIC = [identity, doubled, squared, distance, slopes, only_past, only_future, past_by_distance]


def silu(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.nn.functional.silu(score)


def waves(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score.cos().sin() + torch.tan(b)


def waves_that_meet(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    rising, falling = torch.sin(score), torch.cos(score)
    return rising * falling + torch.tan(b)


def floor_divided(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - q // (kv + 1)


def even_keys(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(kv % 2 == 0, score, -math.inf)


def two_after_another(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return only_future(distance(score, b, h, q, kv), b, h, q, kv)


def neighbourhood(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A neighbourhood on a grid 8 wide, whose rows come by true division."""
    near_rows = (q / 8 - kv / 8).abs() <= 2
    near_columns = (q % 8 - kv % 8).abs() <= 2
    return torch.where(near_rows | near_columns, score, -math.inf)


def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 4.0 * torch.tanh(score / 4.0)


def by_score(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.where(score <= b + 1, score, -math.inf)


MORE = [silu, waves, waves_that_meet, floor_divided, even_keys, two_after_another, neighbourhood, capped, by_score]


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def anticausal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q <= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv <= 11)


def beyond_the_window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv > 11)


def by_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv).abs() <= 3 * h + 2


def by_batch(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((b % 2 == 0) | (kv > 4))


def first_rows(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q < 20) & (kv >= 0)


def everything(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return b >= 0


MASKS = [causal, anticausal, window, by_head, by_batch, first_rows, everything]
