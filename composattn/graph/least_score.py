"""Where a score mod hides a whole row by large negative numbers: one rule for all backends.

Scores of -1e9 or `torch.finfo(torch.float32).min` are how many write "hidden". Beside scores of common size they have
weight 0 with no rule. In a row that has nothing else they are all alike once rounded: beyond 2^25 fp32 keeps steps of
4, no LSE tells the sum of a row from its largest score, and exponents of base 2 overflow or are off by whole numbers.
So such a row counts as one with nothing to attend, as one of -inf does.
"""

LEAST_SCORE = -(2.0**25)
"""A row whose highest score behind a score mod is below this has nothing to attend."""
