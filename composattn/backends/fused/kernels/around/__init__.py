"""Kernels before and behind the main one, with no tensor core: statistics, rounding, sums of parts."""
